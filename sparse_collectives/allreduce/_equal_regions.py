"""P regions of equal width, and how many slots their messages need.

SparCML, section 5.3.2: worker j owns region j of the index space. Indices travel
relative to their region, so that a codec can make them narrower.

Deviation: the paper gives floor(n / P) indices to each worker and the rest to the
last (appendix A). Messages here have one size for all, which the widest region
decides: all have ceil(n / P) indices, and the last ones fewer or none.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _merge, transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.padded_coo import PaddedCOO


class Regions(NamedTuple):
    """How n indices are divided among P owners.

    Attributes:
      size: n.
      workers: P.
      width: indices of a region, ceil(n / P).
    """

    size: int
    workers: int
    width: int

    def boundaries(self) -> jax.Array:
        """Where the regions begin and end, ``i32[P + 1]``."""
        ends = [min(worker * self.width, self.size) for worker in range(self.workers + 1)]
        return jnp.asarray(ends, jnp.int32)


def make_regions(size: int, workers: int) -> Regions:
    """The regions of n indices for P workers."""
    return Regions(size, workers, -(-size // workers))


def split(coo: PaddedCOO, regions: Regions, capacity: int, turn: jax.Array) -> _merge.Blocks:
    """One block of ``capacity`` slots for each owner, with indices of its region."""
    boundaries = regions.boundaries()
    blocks = _merge.split(coo, boundaries, capacity, turn)
    relative = blocks.coo.indices - boundaries[:-1, None]
    indices = jnp.where(blocks.coo.indices < coo.size, relative, regions.width)
    return blocks._replace(coo=PaddedCOO(blocks.coo.values, indices, regions.width))


def from_region(entries: PaddedCOO, regions: Regions, owner: jax.Array) -> PaddedCOO:
    """Entries of region ``owner i32[]`` (or of one region a row, ``i32[b]``) at their indices."""
    start = regions.boundaries()[owner]
    start = start[:, None] if owner.ndim else start
    indices = jnp.where(entries.indices < entries.size, entries.indices + start, regions.size)
    return PaddedCOO(entries.values, indices, regions.size)


def gather(words: jax.Array, regions: Regions, dtype, *, axis: AxisName, codec: Codec) -> PaddedCOO:
    """Everyone's encoded region, on every worker; unique indices, padding in between."""
    everyone = codec.decode(transport.all_gather(words, axis), regions.width, dtype)
    total = from_region(everyone, regions, jnp.arange(regions.workers))
    return PaddedCOO(total.values.reshape(-1), total.indices.reshape(-1), regions.size)


def block_slots(capacity: int, regions: Regions, slack: float) -> int:
    """Slots of one worker's block for one owner: ``slack`` times its share c / P."""
    slots = min(capacity, regions.width)
    return (
        slots
        if slack >= regions.workers
        else min(slots, math.ceil(slack * capacity / regions.workers))
    )


def union_slots(
    capacity: int, regions: Regions, sources: int, slack: float, fill: float | None
) -> int:
    """Slots for the sum of the blocks of ``sources`` workers in one region.

    Args:
      capacity: c, the slots of a selection.
      regions: the regions.
      sources: workers that have contributed.
      slack: slots as a multiple of what is expected.
      fill: the expected union of the selections of all workers as a multiple of c;
        None: that of uniformly random indices, n (1 - (1 - c/n)^P) (appendix B.1).
        ``math.inf``: slots for everything.
    """
    everything = min(sources * block_slots(capacity, regions, slack), regions.width)
    share = capacity / regions.workers
    if fill is None:
        miss = math.log1p(-capacity / regions.size) if capacity < regions.size else -math.inf
        expected = -math.expm1(sources * miss) * regions.size / regions.workers
    else:
        expected = min(fill, sources) * share if fill < math.inf else math.inf
    wanted = slack * expected
    return everything if wanted >= everything else max(1, math.ceil(wanted))
