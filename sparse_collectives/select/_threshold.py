"""A fixed threshold: every entry that reaches a given magnitude.

This is the oldest selection (Strom 2015). It has no statistics and adapts
nothing, so the accumulator decides the count. The static capacity bounds it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import _validation
from sparse_collectives._spec import Spec
from sparse_collectives._types import Selector
from sparse_collectives.select import _frame, _thresholds


def threshold(*, magnitude: float, density: float) -> Selector:
    """Selects the entries whose magnitude reaches ``magnitude``.

    Zeros are never selected; ``magnitude=0`` selects every nonzero entry. NaN counts
    as larger than infinity.

    If more entries reach the threshold than there are slots, a window of them is
    taken. It starts at another place at each step, so each entry is sent eventually.
    The others are counted as overflow and stay with the caller.

    Args:
      magnitude: the threshold, in [0, inf], in the units of the accumulator and rounded to float32.
        A good value depends on the learning rate, the loss and the layer, so it has to be found by
        trial; ``topk`` and ``threshold_reuse`` avoid that.
      density: the slots of the buffer as a share of n, in (0, 1]: an upper bound
        on k / n, not a target.

    Returns:
      A :class:`Selector` whose buffers have ``max(1, round(density * n))`` slots
      and whose state is ``i32[]``, the number of steps.

    Raises:
      TypeError: density is not a number.
      ValueError: an argument is out of its range.

    Cost: one pass over n entries, O(k log n).

    References:
      Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud
      Computing, Interspeech 2015.

    Example:
      >>> import jax.numpy as jnp
      >>> selector = threshold(magnitude=1.0, density=0.75)
      >>> coo, _, info = selector.select(jnp.array([1.0, -3.0, 0.5, 0.0]), selector.init(4))
      >>> coo.indices.tolist(), coo.values.tolist()
      ([0, 1, 4], [1.0, -3.0, 0.0])
    """
    magnitude = _validation.check_number("magnitude", magnitude, 0.0, float("inf"))
    density = _validation.check_density(density)
    with np.errstate(over="ignore", under="ignore"):
        # Rounded here, because a platform may flush subnormals to 0.
        pattern = int(np.float32(magnitude).view(np.int32))

    def choose(acc: jax.Array, k: int, turn: jax.Array):
        return _thresholds.select_reaching(acc, jnp.int32(pattern), capacity=k, turn=turn)

    spec = Spec.of("threshold", magnitude=magnitude, density=density)
    return _frame.counted(choose, density, spec)
