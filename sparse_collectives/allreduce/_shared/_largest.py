"""The k largest of a sparse vector, and the others."""

import jax
import jax.numpy as jnp

from sparse_collectives._coo import _bits, compaction, kth_magnitude
from sparse_collectives.padded_coo import PaddedCOO


def keep_largest(coo: PaddedCOO, k: int) -> tuple[PaddedCOO, list[PaddedCOO]]:
    """The k entries of ``coo[c]`` of largest magnitude, and the others.

    Both in the order of ``coo``; of equals the first are kept. The others are no
    buffer at all where all fit. Zeros are in neither.
    """
    if coo.capacity <= k:
        return coo, []
    bits = jnp.where(coo.indices < coo.size, _bits.magnitude_bits(coo.values), 0)
    threshold = kth_magnitude.kth_magnitude_bits(coo.values, k)
    above = bits > threshold
    tied = (bits == threshold) & (bits > 0)
    rank = jnp.cumsum(tied, dtype=jnp.int32) - 1
    kept = above | (tied & (rank < k - jnp.sum(above, dtype=jnp.int32)))
    largest, _ = compaction.compact_mask(coo, kept, capacity=k)
    others, _ = compaction.compact_mask(coo, (bits > 0) & ~kept, capacity=coo.capacity - k)
    return largest, [others]


def smallest_magnitude(coo: PaddedCOO) -> jax.Array:
    """That of the smallest entry, ``f32[]``; 0 where there is none."""
    bits = _bits.magnitude_bits(coo.values)
    smallest = jnp.min(jnp.where(coo.indices < coo.size, bits, jnp.iinfo(jnp.int32).max))
    return _bits.magnitude_from_bits(jnp.where(coo.count() > 0, smallest, 0))
