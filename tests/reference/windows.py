"""Which of too many entries have a slot, with Python's integers."""

import math

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


def steps_for_all(capacity, count):
    """Steps after which each of ``count`` entries has had a slot, but for 1e-6."""
    return longest_wait(count, capacity, count)
