"""The slots of the messages in algorithms with regions of equal width.

The module is plain Python, for the algorithms and for the cost model.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

# The largest number of sparse forms of a message.
_SPARSE_FORMS = 3


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


def make_regions(size: int, workers: int) -> Regions:
    """The regions of n indices for P workers."""
    return Regions(size, workers, -(-size // workers))


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
      slack: slots as a multiple of the expected number.
      fill: the expected union of the selections of all workers as a multiple of c;
        None: the union of uniformly random indices, n (1 - (1 - c/n)^P) (appendix B.1).
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


def sparse_forms(most: int, least: int, fits: Callable[[int], bool]) -> list[int]:
    """The slots of the sparse forms of a message, ascending; each has half those of the next.

    Args:
      most: no form has more slots.
      least: no form has fewer slots, unless the largest has fewer.
      fits: whether a message of so many slots is short enough; then all shorter ones are.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    slots = {-(-low // 2**halvings) for halvings in range(_SPARSE_FORMS)}
    return sorted(s for s in slots if s >= max(1, min(least, low)))
