"""P regions of equal width: the split, and the allgather of their sums.

SparCML, section 5.3.2: worker j owns region j of the index space. Indices travel
relative to their region, so that a codec can make them narrower.

Deviation: the paper gives floor(n / P) indices to each worker and the rest to the
last (appendix A). Messages here have one size for all, which the widest region
decides: all have ceil(n / P) indices, and the last ones fewer or none.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._shared import _merge
from sparse_collectives.allreduce._shared._slots import Regions
from sparse_collectives.padded_coo import PaddedCOO


def split(coo: PaddedCOO, regions: Regions, capacity: int, turn: jax.Array) -> _merge.Blocks:
    """One block of ``capacity`` slots for each owner, with indices of its region."""
    boundaries = _boundaries(regions)
    blocks = _merge.split(coo, boundaries, capacity, turn)
    relative = blocks.coo.indices - boundaries[:-1, None]
    indices = jnp.where(blocks.coo.indices < coo.size, relative, regions.width)
    return blocks._replace(coo=PaddedCOO(blocks.coo.values, indices, regions.width))


def from_region(entries: PaddedCOO, regions: Regions, owner: jax.Array) -> PaddedCOO:
    """Entries of region ``owner i32[]`` (or of one region a row, ``i32[b]``) at their indices."""
    start = _boundaries(regions)[owner]
    start = start[:, None] if owner.ndim else start
    indices = jnp.where(entries.indices < entries.size, entries.indices + start, regions.size)
    return PaddedCOO(entries.values, indices, regions.size)


def gather(words: jax.Array, regions: Regions, dtype, *, axis: AxisName, codec: Codec) -> PaddedCOO:
    """Everyone's encoded region, on every worker; unique indices, padding in between."""
    everyone = codec.decode(transport.all_gather(words, axis), regions.width, dtype)
    total = from_region(everyone, regions, jnp.arange(regions.workers, dtype=jnp.int32))
    return PaddedCOO(total.values.reshape(-1), total.indices.reshape(-1), regions.size)


def gather_dense(
    words: jax.Array, regions: Regions, dtype, *, axis: AxisName, codec: Codec
) -> jax.Array:
    """Everyone's encoded region, all values of it, on every worker: ``f[n]``."""
    everyone = codec.decode_dense(transport.all_gather(words, axis), regions.width, dtype)
    return everyone.reshape(-1)[: regions.size]


def _boundaries(regions: Regions) -> jax.Array:
    """Where the regions begin and end, ``i32[P + 1]``."""
    ends = [min(worker * regions.width, regions.size) for worker in range(regions.workers + 1)]
    return jnp.asarray(ends, jnp.int32)
