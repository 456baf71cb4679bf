"""The messages of a reduce-scatter in ceil(log2 P) rounds, for any P, and their slots.

The vector is cut into P blocks, one for each owner. A worker holds its part of the
blocks of the m workers from itself on, at first m = P. A round of distance d sends the
blocks from d on to the worker d further, for whom they are the first ones, and goes on
with the d first; d is the largest power of two below P, then its half, down to 1. So the
first round moves P - d blocks and the others d each, P - 1 blocks in all, and in every
round every worker sends one message and receives one.

Plain Python, for the algorithm itself and for the cost model.
"""

import math
from typing import NamedTuple

# Slots beyond the share of a block: those of four standard deviations, and a few.
_DEVIATIONS, _MORE = 4.0, 4


class Round(NamedTuple):
    """One message.

    Attributes:
      distance: to the worker that receives it; as many blocks stay.
      blocks: in the message.
      slots: of a block in the message.
      held: slots of a block that stays, after the round.
    """

    distance: int
    blocks: int
    slots: int
    held: int


class Plan(NamedTuple):
    """All messages, and the slots of what is held.

    Attributes:
      width: indices of a block, ceil(n / P).
      slots: of a block in a message, and in the result.
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
