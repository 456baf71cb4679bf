"""Gaussian-k: the threshold that a normal distribution would have.

Shi et al. 2019 fit a normal distribution to the accumulator and select by its percent-point
function. This needs the mean and the standard deviation but no search. It is as good as the fit: if
the distribution of a gradient has a sharper peak and other tails than a normal one, the count is
far from k. The published fix lowers the threshold until 3k/4 entries pass.
"""

import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Selector
from sparse_collectives.select import _frame, _statistics, _thresholds

_FACTOR = 0.8
_MAX_ROUNDS = 20


def gaussian_k(density: float, *, adjust: bool = False, headroom: float = 0.25) -> Selector:
    r"""Selects by the threshold of a fitted normal distribution.

    The threshold is :math:`|\mu| + \sigma\,\Phi^{-1}(1 - k / 2n)`, with the mean
    and the standard deviation of the finite entries. The count is k for normal
    entries, and often far from k for gradients. Zeros are never selected.

    NaN and infinity are left out of the statistics and are always selected. The threshold is never
    above the largest finite magnitude, so at least one entry is selected if any is nonzero. If all
    magnitudes are subnormal, the statistics may vanish; then every nonzero entry passes.

    Args:
      density: the target for k / n, in (0, 1]. At 1 every nonzero is selected.
      adjust: whether to lower the threshold, by 20 % at a time and at most 20
        times, until at least 3k/4 entries pass.
      headroom: slots beyond k, as a share of k. Entries that pass the threshold
        but find no slot stay with the caller. Which entries these are changes
        from step to step, so each of them is sent eventually.

    Returns:
      A :class:`Selector` whose buffers have ``ceil((1 + headroom) k)`` slots and
      whose state is ``i32[]``, the steps taken.

    Raises:
      TypeError: density is not a number.
      ValueError: an argument is out of its range.

    Cost: five passes over n entries (maximum, check for NaN, mean, deviation,
    selection); with ``adjust`` one more, and one for each time the threshold is
    lowered; three more if some entries are not finite.

    References:
      Shi et al. 2019, "Understanding top-k sparsification in distributed deep
      learning"; the adjustment as in Ok-Topk (Li and Hoefler 2022), section 5.4.

    Example:
      >>> import jax.numpy as jnp
      >>> selector = gaussian_k(density=0.25)
      >>> acc = jnp.array([0.1, -3.0, 0.2, 0.0])
      >>> coo, _, info = selector.select(acc, selector.init(4))
      >>> coo.indices.tolist(), int(info.selected)
      ([1, 4], 1)
    """
    density = _validation.check_density(density)
    if not isinstance(adjust, bool):
        raise ValueError(f"adjust must be True or False, got {adjust!r}.")
    headroom = _validation.check_number("headroom", headroom, 0.0, math.inf)

    def find(acc: jax.Array, k: int) -> jax.Array:
        threshold = _fitted_threshold(acc, k)
        return _lowered(acc, threshold, k) if adjust else threshold

    def choose(acc: jax.Array, k: int, turn: jax.Array):
        return _thresholds.select_about(acc, k, headroom, turn, find)

    spec = Spec.of("gaussian_k", density=density, adjust=adjust, headroom=headroom)
    return _frame.counted(choose, density, spec)


def _fitted_threshold(acc: jax.Array, k: int) -> jax.Array:
    """The magnitude that k of n entries reach if they are normal."""
    # Deviation: |mean|, so that acc and -acc select the same entries.
    z = -NormalDist().inv_cdf(k / acc.shape[0] / 2)
    extent = _statistics.extent(acc)
    mean = _statistics.finite_sum(acc, lambda x: x * extent.down, extent.clean) / extent.count
    # From the deviations instead of the squares, which cancel if the mean is large.
    squares = _statistics.finite_sum(acc, lambda x: (x * extent.down - mean) ** 2, extent.clean)
    deviation = jnp.sqrt(squares / extent.count)
    # Bounded by the maximum before it is scaled back, so that it does not overflow.
    threshold = jnp.minimum(jnp.abs(mean) + z * deviation, extent.largest * extent.down)
    return threshold * extent.up


def _lowered(acc: jax.Array, threshold: jax.Array, k: int) -> jax.Array:
    """The threshold, lowered until 3k/4 entries reach it."""

    def too_few(carry):
        turn, _, count = carry
        return (turn < _MAX_ROUNDS) & (4 * count.astype(jnp.float32) < 3 * k)

    def lower(carry):
        turn, old, _ = carry
        # Tied to the carry; otherwise XLA moves |acc| out of the loop, into n words.
        here, threshold = lax.optimization_barrier((acc, old * _FACTOR))
        count = _statistics.count_reaching(here, _bits.magnitude_bits(threshold))
        return turn + 1, threshold, count

    count = _statistics.count_reaching(acc, _bits.magnitude_bits(threshold))
    return lax.while_loop(too_few, lower, (jnp.zeros_like(count), threshold, count))[1]
