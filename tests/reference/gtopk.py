"""gTop-k in plain NumPy, written from the paper, with messages of exact size."""

import numpy as np


def largest(entries: dict[int, np.float32], k: int) -> set[int]:
    """The indices of the k largest magnitudes, lowest index first among equals; no zeros."""
    order = sorted(entries, key=lambda index: (-abs(float(entries[index])), index))
    return {index for index in order[:k] if entries[index] != 0}


def gtopk(selected: list[dict[int, float]], size: int, k: int):
    """A tree of P leaves: at each level pairs add up, and keep the k largest.

    Returns the total ``f32[n]``, and ``f64[P, n]``: what each worker dropped.
    """
    dropped = np.zeros((len(selected), size))
    held = [{i: np.float32(v) for i, v in entries.items()} for entries in selected]
    for worker, entries in enumerate(held):
        held[worker] = _reduce(entries, k, dropped[worker])
    stride = 1
    while stride < len(held):
        for worker in range(0, len(held), 2 * stride):
            if worker + stride < len(held):
                merged = dict(held[worker])
                for index, value in held[worker + stride].items():
                    merged[index] = merged[index] + value if index in merged else value
                held[worker] = _reduce(merged, k, dropped[worker])
        stride *= 2
    total = np.zeros(size, np.float32)
    for index, value in held[0].items():
        total[index] = value
    return total, dropped


def _reduce(entries, k, dropped):
    kept = largest(entries, k)
    for index in entries.keys() - kept:
        dropped[index] += entries[index]
    return {index: entries[index] for index in kept}
