"""RedSync: a threshold searched between the mean and the maximum.

Fang et al. 2019 place the threshold at ``mean + ratio (maximum - mean)`` of the
magnitudes and halve the interval of the ratio until the count is in [k, 2k].

Deviation: the search is bounded by rounds instead of the width of the interval.
If it ends without success, the side on which at least k entries pass is taken,
because with ties the other side may select nothing.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Selector
from sparse_collectives.select import _frame, _statistics, _thresholds


def redsync(density: float, *, rounds: int = 20, headroom: float = 1.0) -> Selector:
    """Selects by a threshold that between k and 2k entries reach.

    The threshold is not below the mean magnitude, so fewer than k entries may pass if the density
    is large or if few entries make up the sum. Zeros are never selected.

    NaN and infinity are left out of the mean and the maximum, are always selected,
    and are counted. If all magnitudes are subnormal, the mean and the maximum may
    vanish; then every nonzero entry passes.

    Args:
      density: the target for k / n, in (0, 1]. At 1 every nonzero is selected.
      rounds: the largest number of thresholds to try. A maximum far from the rest (a
        heavy tail) takes one round for each power of two of the distance.
      headroom: slots beyond k, as a share of k; 1 has room for every count that the search aims at.
        Entries that pass the threshold but find no slot stay with the caller. Which entries these
        are changes from step to step, so each of them is sent eventually.

    Returns:
      A :class:`Selector` whose buffers have ``ceil((1 + headroom) k)`` slots and
      whose state is ``i32[]``, the steps taken.

    Raises:
      TypeError: density is not a number.
      ValueError: an argument is out of its range.

    Cost: three passes over n entries (maximum, mean, selection) and one for each round, two to six
    of them for gradients; three more if some entries are not finite.

    References:
      Fang et al. 2019, "RedSync: reducing synchronization bandwidth for
      distributed deep learning training system", threshold binary search.

    Example:
      >>> import jax.numpy as jnp
      >>> selector = redsync(density=0.25)
      >>> acc = jnp.array([0.1, -3.0, 0.2, 0.0])
      >>> coo, _, info = selector.select(acc, selector.init(4))
      >>> coo.indices.tolist(), int(info.selected)
      ([1, 4], 1)
    """
    density = _validation.check_density(density)
    rounds = _validation.check_positive_int("rounds", rounds)
    headroom = _validation.check_number("headroom", headroom, 0.0, math.inf)

    def choose(acc: jax.Array, k: int, turn: jax.Array):
        find = functools.partial(_searched_threshold, rounds=rounds)
        return _thresholds.select_about(acc, k, headroom, turn, find)

    spec = Spec.of("redsync", density=density, rounds=rounds, headroom=headroom)
    return _frame.counted(choose, density, spec)


def _searched_threshold(acc: jax.Array, k: int, rounds: int) -> jax.Array:
    """The threshold that k to 2k entries reach, or the nearest lower one that was tried."""
    extent = _statistics.extent(acc)
    mean = extent.mean(extent.count)

    def unfinished(carry):
        turn, _, _, found = carry
        return (turn < rounds) & ~found

    def halve(carry):
        turn, low, high, _ = carry
        # Tied to the carry; otherwise XLA moves |acc| out of the loop, into n words.
        here, ratio = lax.optimization_barrier((acc, (low + high) / 2))
        threshold = mean + ratio * (extent.largest - mean)
        count = _statistics.count_reaching(here, _bits.magnitude_bits(threshold))
        enough = count >= k
        # Compared as floats: 2k may not fit an int32.
        found = enough & (count.astype(jnp.float32) <= 2.0 * k)
        return turn + 1, jnp.where(enough, ratio, low), jnp.where(enough, high, ratio), found

    low = jnp.zeros_like(mean)
    # It varies over the workers as the entries do; its type must say so from the start.
    found = low != low
    start = (jnp.zeros((), jnp.int32), low, jnp.ones_like(low), found)
    _, ratio, _, _ = lax.while_loop(unfinished, halve, start)
    return mean + ratio * (extent.largest - mean)
