"""Selection by threshold: its slots, the entries that get them, and how a threshold follows.

The text of Ok-Topk (section 3.1.3) reuses a threshold unchanged. The program that it links to
(section 1) does not: whenever a count is far from k, it moves the threshold by about 1 %. The
factors and bounds here are the program's for VGG-16; for BERT it has 1.025 and 1.036.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits, _compaction
from sparse_collectives._types import SelectInfo

# Within a step, while more than 4k/3 entries pass, and at most MOST_RAISES times.
_RAISE, MOST_RAISES = 1.03, 5
# From one step to the next.
_LOCAL, _GLOBAL = 1.012, 1.008


def slots_for(k: int, size: int, headroom: float) -> int:
    """``ceil((1 + headroom) k)``, at most n; all n at density 1 or without a limit."""
    if k == size or math.isinf(headroom):
        return size
    return min(size, math.ceil((1 + headroom) * k))


def select_reaching(
    acc: jax.Array, threshold_bits: jax.Array, *, capacity: int, turn: jax.Array
) -> tuple[PaddedCOO, SelectInfo]:
    """The entries that reach a magnitude; if there are too many, a window that moves.

    Args:
      acc: ``f[n]``.
      threshold_bits: ``i32[]``, the bit pattern of the magnitude; zeros never reach it.
      capacity: static number of slots.
      turn: ``i32[]``, the steps taken, which place the window.
    """
    coo, count = _compaction.compact(acc, threshold_bits, capacity=capacity, turn=turn)
    selected = jnp.minimum(count, capacity)
    threshold = _bits.magnitude_from_bits(threshold_bits)
    return coo, SelectInfo(selected, count - selected, threshold)


def select_about(
    acc: jax.Array,
    k: int,
    headroom: float,
    turn: jax.Array,
    find: Callable[[jax.Array, int], jax.Array],
) -> tuple[PaddedCOO, SelectInfo]:
    """The entries that reach the magnitude ``find(acc, k)``; at density 1 all nonzeros."""
    size = acc.shape[0]
    threshold = jnp.zeros((), jnp.float32) if k == size else find(acc, k)
    bits, capacity = _bits.magnitude_bits(threshold), slots_for(k, size, headroom)
    return select_reaching(acc, bits, capacity=capacity, turn=turn)


def raised(threshold: jax.Array) -> jax.Array:
    """The local threshold of another try within the step, ``f32[]``."""
    return threshold * jnp.float32(_RAISE)


def too_many(count: jax.Array, k: int) -> jax.Array:
    """Whether a step has to try again with a higher local threshold, ``bool[]``."""
    return count > 4 * k // 3


def next_local(threshold: jax.Array, count: jax.Array, k: int) -> jax.Array:
    """The local threshold of the next step, ``f32[]``: it moves below 2k/3 and above 5k/4."""
    return _moved(threshold, count, -(-2 * k // 3), 5 * k // 4, _LOCAL)


def next_global(threshold: jax.Array, count: jax.Array, k: int) -> jax.Array:
    """The global threshold of the next step, ``f32[]``: it moves below 2k/3 and above 4k/3."""
    return _moved(threshold, count, -(-2 * k // 3), 4 * k // 3, _GLOBAL)


def _moved(threshold: jax.Array, count: jax.Array, least: int, most: int, by: float) -> jax.Array:
    # A factor in both directions, because some compilers turn a division into one anyway.
    factors = jnp.asarray([1 / by, 1.0, by], jnp.float32)
    which = 1 - (count < least).astype(jnp.int32) + (count > most).astype(jnp.int32)
    return threshold * factors[which]
