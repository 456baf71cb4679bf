"""SparDL in plain NumPy, written from the paper, with messages of exact size.

It shares no code with the library. Which block an index is in is given.
"""

import math

import numpy as np


def spardl(selected: list[dict[int, float]], block: np.ndarray, k: int):
    """Spar-Reduce-Scatter, an allgather, and global residual collection.

    Index i is in block ``block[i]``, the number of its owner, and a block has ceil(k / P) entries.
    Returns the total ``f32[n]``, ``f64[P, n]``: what each worker keeps, and for each message the
    entries that each worker sends in it, the allgather last.
    """
    workers, size = len(selected), len(block)
    share = math.ceil(k / workers)
    cut_off = np.zeros((workers, size))
    held = [[{} for _ in range(workers)] for _ in range(workers)]
    for worker, entries in enumerate(selected):
        for index, value in entries.items():
            held[worker][block[index]][index] = np.float32(value)

    def cut(worker, each):
        """The largest of a block, lowest index first among equals; no zeros."""
        entries = held[worker][each]
        order = sorted(entries, key=lambda index: (-abs(float(entries[index])), index))
        kept = {index for index in order[:share] if entries[index] != 0}
        for index in entries.keys() - kept:
            cut_off[worker, index] += entries[index]
        return {index: entries[index] for index in sorted(kept)}

    lengths = []
    ahead = workers  # of the blocks of this worker and those after it, the parts that it has
    while ahead > 1:
        distance = 1
        while 2 * distance < ahead:
            distance *= 2
        messages = [
            {
                (worker + d) % workers: cut(worker, (worker + d) % workers)
                for d in range(distance, ahead)
            }
            for worker in range(workers)
        ]
        lengths.append([sum(map(len, message.values())) for message in messages])
        for worker, message in enumerate(messages):
            for each, entries in message.items():
                there = held[(worker + distance) % workers][each]
                for index, value in entries.items():
                    there[index] = there[index] + value if index in there else value
        ahead = distance

    total = np.zeros(size, np.float32)
    lengths.append([])
    for worker in range(workers):
        entries = cut(worker, worker)
        lengths[-1].append(len(entries))
        for index, value in entries.items():
            total[index] = value

    kept = np.where(total != 0, cut_off, 0)
    for worker, entries in enumerate(selected):
        for index, value in entries.items():
            if total[index] == 0:
                kept[worker, index] = value
    return total, kept, lengths
