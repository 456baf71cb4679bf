"""What the selectors by threshold share: how many slots, and which entries get them."""

import math

import jax
import jax.numpy as jnp

from sparse_collectives._coo import _bits, compaction
from sparse_collectives._types import SelectInfo
from sparse_collectives.padded_coo import PaddedCOO


def slots_for(k: int, size: int, headroom: float) -> int:
    """``ceil((1 + headroom) k)``, at most n; all n at density 1 or without a limit."""
    if k == size or math.isinf(headroom):
        return size
    return min(size, math.ceil((1 + headroom) * k))


def select_reaching(
    acc: jax.Array, threshold_bits: jax.Array, *, capacity: int, turn: jax.Array
) -> tuple[PaddedCOO, SelectInfo]:
    """The entries that reach a magnitude; if there are too many, those whose turn it is.

    Args:
      acc: ``f[n]``.
      threshold_bits: ``i32[]``, the bit pattern of the magnitude; zeros never reach it.
      capacity: static number of slots.
      turn: ``i32[]``, the steps taken.
    """
    coo, count = compaction.compact(acc, threshold_bits, capacity=capacity, turn=turn)
    selected = jnp.minimum(count, capacity)
    threshold = _bits.magnitude_from_bits(threshold_bits)
    return coo, SelectInfo(selected, count - selected, threshold)
