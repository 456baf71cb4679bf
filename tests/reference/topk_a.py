"""TopkA and the sparse allgather in plain NumPy, from Table 1 and section 2 of Ok-Topk."""

import numpy as np


def topk_a(selected: list[dict[int, float]], size: int) -> np.ndarray:
    """Everyone gathers all pairs and adds them up, in the order of the workers."""
    total = np.zeros(size, np.float32)
    for entries in selected:
        for index, value in entries.items():
            total[index] += np.float32(value)
    return total


def sparse_allgather(selected: list[dict[int, float]], size: int, first: int = 0):
    """The concatenation; of several entries at one index that of the first worker from ``first``.

    Returns the total ``f32[n]``, and for each worker what it keeps.
    """
    total, taken = np.zeros(size, np.float32), set()
    kept = [{} for _ in selected]
    for worker in [*range(first, len(selected)), *range(first)]:
        entries = selected[worker]
        kept[worker] = {index: value for index, value in entries.items() if index in taken}
        for index, value in entries.items():
            if index not in taken:
                total[index] = value
        taken |= entries.keys()
    return total, kept
