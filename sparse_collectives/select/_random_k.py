"""Random-k: k random indices, the control for every other selector.

The indices are the images of 0 .. k-1 under a random permutation of 0 .. n-1.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, _validation, transport
from sparse_collectives._sparse_ops import _bits, _bitset, _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, SelectInfo, Selector
from sparse_collectives.select import _frame

# From the golden ratio: multiples of it, modulo 2**32, are far from one another.
_STRIDE = 0x9E3779B9 - 2**32


def random_k(density: float, *, seed: int = 0, axis: AxisName | None = None) -> Selector:
    """Draws ``k = max(1, round(density * n))`` distinct indices at each step.

    Every index is equally likely, whatever its value, and the draws of different steps are
    independent. An index whose entry is zero may be drawn but is not sent: its slot is padding.

    Args:
      density: k / n, in (0, 1].
      seed: the seed of the random numbers, in [0, 2**31).
      axis: the mesh axis whose workers draw different indices; ``select`` must then run inside a
        function that is mapped over it. None: all workers draw the same indices, so that the union
        of the selections has k entries instead of up to P k.

    Returns:
      A :class:`Selector` whose buffers have k slots and whose state is ``i32[]``. The
      state starts at 0 and grows by 1 at each step; in :func:`layerwise`, layers of the
      same size start at different numbers. ``info.threshold`` is 0.

    Raises:
      ValueError: an argument is out of its range.
      ValueError: at ``select``, an axis that is not bound.

    Cost: O(k log n): about six rounds of arithmetic for each draw and no pass over n
    entries, but two over n / 32 words to put the indices in order.

    References:
      Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018.

    Example:
      >>> import jax.numpy as jnp
      >>> selector = random_k(density=0.5, seed=3)
      >>> coo, _, info = selector.select(jnp.arange(1.0, 9.0), selector.init(8))
      >>> int(info.selected), bool((coo.values == coo.indices + 1).all())
      (4, True)
    """
    density = _validation.check_density(density)
    seed = _validation.check_positive_int("seed", seed, minimum=0)
    if seed >= 2**31:
        raise ValueError(f"seed must be below 2**31, got {seed}.")

    def choose(acc: jax.Array, k: int, turn: jax.Array):
        size = acc.shape[0]
        key = jax.random.fold_in(_hash.key(seed), turn)
        if axis is not None:
            transport.axis_size(axis)  # Raises if the axis is not bound.
            key = jax.random.fold_in(key, transport.axis_index(axis))
        drawn = _hash.permuted(key, jnp.arange(k, dtype=jnp.int32), size)
        nonzero = _bits.magnitude_bits(acc.at[drawn].get(mode="clip")) > 0
        members = jnp.where(nonzero, drawn, size)
        words = _bitset.insert(_bitset.empty(size), members, size)
        coo, count = _compaction.entries_at(acc, words, k)
        info = SelectInfo(count, jnp.zeros_like(count), jnp.zeros_like(count, jnp.float32))
        return coo, info

    def fork(state: jax.Array, number: jax.Array) -> jax.Array:
        return state + number * jnp.int32(_STRIDE)

    spec = Spec.of("random_k", density=density, seed=seed, by_worker=axis is not None)
    return _frame.counted(choose, density, spec)._replace(fork=fork)
