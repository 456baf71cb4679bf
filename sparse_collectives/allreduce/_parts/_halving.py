"""The messages of a reduce-scatter in ceil(log2 P) rounds, for any P, and their slots.

The vector is cut into P blocks, one for each owner. A worker holds its part of the
blocks of m workers, beginning with its own; at first m = P. A round of distance d sends the
blocks from number d on to the worker at distance d, for which they are the first ones, and goes
on with the first d blocks; d is the largest power of two below P, then half of it, down to 1. So
the first round moves P - d blocks and each later one d, P - 1 blocks in all, and in every
round every worker sends one message and receives one.

The module is plain Python, for the algorithm and for the cost model.
"""

import math
from typing import NamedTuple

# Slots in addition to the share of a block: four standard deviations, and a few.
_DEVIATIONS, _MORE = 4.0, 4


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


class Plan(NamedTuple):
    """All messages, and the slots of the blocks that are held.

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


def make_plan(size: int, k: int, workers: int, selected: int) -> Plan:
    """The plan for k of n entries over P workers.

    Args:
      size: n.
      k: entries of the result; a block has its share of it, rounded up.
      workers: P.
      selected: slots of a worker's selection.
    """
    width = -(-size // workers)
    share = selected / workers
    room = math.ceil(share + _DEVIATIONS * math.sqrt(share)) + _MORE
    first = held = min(selected, width, room)
    most = min(-(-k // workers), width)
    rounds, blocks = [], workers
    for level in reversed(range((workers - 1).bit_length())):
        distance, slots = 1 << level, min(most, held)
        held = min(held + slots, width)
        rounds.append(Round(distance, blocks - distance, slots, held))
        blocks = distance
    return Plan(width, min(most, held), first, tuple(rounds))
