"""The entries that get a slot among too many, and crowds in which a moving window starves one.

It uses Python's integers.
"""

import math
from typing import NamedTuple

import numpy as np

_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF


def _mix(x):
    """``lowbias32`` of C. Wellons."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def start(turn, count):
    """Where the window over ``count`` entries starts: at a hash of the turn."""
    key = _mix((turn + _GOLDEN) & _MASK)
    return _mix(_mix(key) + _mix(key) & _MASK) % count


def window(entries, capacity, turn):
    """The entries that have a slot at ``turn``, in their order."""
    if len(entries) <= capacity:
        return entries
    ranks = (start(turn, len(entries)) + np.arange(capacity)) % len(entries)
    return entries[np.sort(ranks)]


def longest_wait(steps, capacity, count):
    """Steps that a window of ``capacity`` of ``count`` entries keeps an entry waiting.

    An entry has a slot with probability c / C at each step, independently of the steps
    before; so of T waits one is of m steps with probability T (1 - c/C)^m at most. This
    is the m for which that is 1e-6.
    """
    return math.ceil(math.log(steps / 1e-6) / -math.log1p(-capacity / count))


# Data with a period, in which a window that moves on by its own length starves an entry.

PERIODS = range(1, 9)


class Crowd(NamedTuple):
    """Entries in a line that outnumber the slots."""

    present: np.ndarray  # bool[period, length], the entries that are there at each step
    watched: int  # an entry that is there at every step
    count: int  # how many there are at each step


def crowd(capacity, period, most):
    """A crowd in which the window ``[turn c, (turn + 1) c)`` modulo the count starves entries.

    Some entries stay. At each step as many others come as there are slots, with exactly the
    ranks of the window among those that stay. None if no count up to ``most`` has the period.
    """
    for count in range(most, capacity, -1):
        if count // math.gcd(count, capacity) == period:
            break
    else:
        if period > 1:
            return None
        # All entries stay, so no moving window starves one.
        return Crowd(np.ones((1, most), bool), most // 2, most)
    staying = count - capacity
    in_gap = np.zeros((period, staying + 1), int)
    for turn in range(period):
        ranks = np.sort((turn * capacity + np.arange(capacity)) % count)
        np.add.at(in_gap[turn], ranks - np.arange(capacity), 1)
    columns = []
    for gap, length in enumerate(in_gap.max(0)):
        columns += [in_gap[:, gap] > place for place in range(length)]
        columns += [np.ones(period, bool)] * (gap < staying)
    present = np.stack(columns, axis=1)
    assert (present.sum(1) == count).all()
    stays = np.flatnonzero(present.all(0))
    who = Crowd(present, int(stays[len(stays) // 2]), count)
    # The window that moves on by its length never serves the watched entry.
    for turn in range(40 * period):
        ranks = (turn * capacity + np.arange(capacity)) % count
        assert who.watched not in np.flatnonzero(present[turn % period])[ranks]
    return who


def crowds(capacity, most):
    """The crowds of every possible period."""
    found = {period: crowd(capacity, period, most) for period in PERIODS}
    return {period: who for period, who in found.items() if who is not None}


def longest_run(waits):
    """The longest run of true values."""
    longest = now = 0
    for waiting in np.asarray(waits):
        now = now + 1 if waiting else 0
        longest = max(longest, now)
    return longest
