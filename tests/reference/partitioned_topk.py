"""Agreed indices and full sums, in NumPy, with loops."""

import numpy as np


def part_of_each_index(size, workers, block, rounds):
    """The part that each index belongs to: blocks in turn, then runs of equal length."""
    owner = np.zeros(size, int)
    dealt = rounds * workers * block
    rest = -(-(size - dealt) // workers)
    for index in range(size):
        if index < dealt:
            owner[index] = index // block % workers
        else:
            owner[index] = (index - dealt) // rest
    return owner


def step(acc, count, k_each, owner):
    """Step ``count`` of ``acc f[P, n]`` in float64: the total, and the accumulators after it.

    Each worker selects ``k_each`` entries; ``owner`` is the part of each index.
    """
    acc = np.array(acc, np.float64)
    workers, size = acc.shape
    chosen = []
    for worker in range(workers):
        mine = np.flatnonzero(owner == (worker + count) % workers)
        mine = mine[acc[worker, mine] != 0]
        order = np.lexsort((mine, -np.abs(acc[worker, mine])))
        chosen += list(mine[order[:k_each]])
    total = np.zeros(size)
    for index in chosen:
        total[index] = acc[:, index].sum()
        acc[:, index] = 0
    return total, acc
