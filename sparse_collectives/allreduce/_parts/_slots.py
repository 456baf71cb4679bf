"""The slots of the messages in algorithms with regions of equal width, and of SparDL.

The module is plain Python, for the algorithms and for the cost model.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

# Slots in addition to the share of a block: four standard deviations, and a few.
_DEVIATIONS, _MORE = 4.0, 4
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
    """The slots of the sparse forms of a message, ascending; each has half the slots of the next.

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


class Round(NamedTuple):
    """One message.

    Attributes:
      distance: the distance to the worker that receives it; as many blocks stay.
      blocks: blocks in the message.
      slots: slots of a block in the message.
      held: slots of a block that stays, after the round.
    """

    distance: int
    blocks: int
    slots: int
    held: int


class Halving(NamedTuple):
    """The messages of a reduce-scatter in ceil(log2 P) rounds, for any P, and their slots.

    The vector is cut into P blocks, one for each owner. A worker holds its part of the blocks of m
    workers, beginning with its own; at first m = P. A round of distance d sends the blocks from
    number d on to the worker at distance d, for which they are the first ones, and goes on with the
    first d blocks; d is the largest power of two below P, then half of it, down to 1. So the first
    round moves P - d blocks and each later one d, P - 1 blocks in all, and in every round every
    worker sends one message and receives one.

    Attributes:
      width: indices of a block, ceil(n / P).
      slots: slots of a block in a message, and in the result.
      first: slots of a block before the first round.
      rounds: the messages, in order.
    """

    width: int
    slots: int
    first: int
    rounds: tuple[Round, ...]


def make_halving(size: int, k: int, workers: int, selected: int) -> Halving:
    """The plan for k of n entries over P workers.

    Args:
      size: n.
      k: entries of the result; a block has its share of it, rounded up.
      workers: P.
      selected: slots of a worker's selection.
    """
    width = -(-size // workers)
    share = selected / workers
    roomy = math.ceil(share + _DEVIATIONS * math.sqrt(share)) + _MORE
    first = held = min(selected, width, roomy)
    most = min(-(-k // workers), width)
    rounds, blocks = [], workers
    for level in reversed(range((workers - 1).bit_length())):
        distance, slots = 1 << level, min(most, held)
        held = min(held + slots, width)
        rounds.append(Round(distance, blocks - distance, slots, held))
        blocks = distance
    return Halving(width, min(most, held), first, tuple(rounds))
