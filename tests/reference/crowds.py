"""Data with a period, in which a window that moves on by its own length starves someone."""

import math
from typing import NamedTuple

import numpy as np

PERIODS = range(1, 9)


class Crowd(NamedTuple):
    """Entries in a line, too many for the slots."""

    present: np.ndarray  # bool[period, length], who is there at each step
    watched: int  # one who is there at every step
    count: int  # how many there are at each step


def crowd(capacity, period, most):
    """Those whom the window ``[turn c, (turn + 1) c)``, modulo the count, never serves.

    Some stay, and at each step as many as there are slots come: with the very ranks of
    the window, between those who stay. None if no count up to ``most`` has the period.
    """
    for count in range(most, capacity, -1):
        if count // math.gcd(count, capacity) == period:
            break
    else:
        if period > 1:
            return None
        # Always the same: no window that moves starves anyone.
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
    return Crowd(present, int(stays[len(stays) // 2]), count)


def crowds(capacity, most):
    found = {period: crowd(capacity, period, most) for period in PERIODS}
    return {period: who for period, who in found.items() if who is not None}


def longest_run(waits):
    """The longest run of true values."""
    longest = now = 0
    for waiting in np.asarray(waits):
        now = now + 1 if waiting else 0
        longest = max(longest, now)
    return longest
