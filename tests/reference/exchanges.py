"""Exchanges of pairs in plain NumPy, message by message, each written from its paper.

They share no code with the library. Each worker has selected entries, from index to value; the
results are the total ``f32[n]`` and each worker's residual ``f64[P, n]``.
"""

import math

import numpy as np


def topk_a(selected: list[dict[int, float]], size: int):
    """Table 1 of Ok-Topk: everyone adds up all pairs, in the order of the workers."""
    total: dict[int, float] = {}
    for entries in selected:
        _add(total, {index: np.float32(value) for index, value in entries.items()})
    return _vector(total, size), np.zeros((len(selected), size))


def sparse_allgather(selected: list[dict[int, float]], size: int, first: int = 0):
    """Section 2: at each index the entry of the first worker that has one, from ``first`` on."""
    total: dict[int, float] = {}
    kept = np.zeros((len(selected), size))
    for worker in [*range(first, len(selected)), *range(first)]:
        for index, value in selected[worker].items():
            if index in total:
                kept[worker, index] = value
            else:
                total[index] = value
    return _vector(total, size), kept


def gtopk(selected: list[dict[int, float]], size: int, k: int):
    """gTop-k: a tree of P leaves; at each level pairs add up and keep the k largest."""
    dropped = np.zeros((len(selected), size))
    held = [_cut(entries, k, row) for entries, row in zip(selected, dropped, strict=True)]
    stride = 1
    while stride < len(held):
        for worker in range(0, len(held) - stride, 2 * stride):
            _add(held[worker], held[worker + stride])
            held[worker] = _cut(held[worker], k, dropped[worker])
        stride *= 2
    return _vector(held[0], size), dropped


def spardl(selected: list[dict[int, float]], block: np.ndarray, k: int):
    """SparDL: Spar-Reduce-Scatter, an allgather, and global residual collection.

    Index i is in block ``block[i]``, the number of its owner, and a block has ceil(k / P) entries.
    It also returns, for each message, the number of entries that each worker sends; the allgather
    is last.
    """
    workers, size = len(selected), len(block)
    share = math.ceil(k / workers)
    cut_off = np.zeros((workers, size))
    held = [[{} for _ in range(workers)] for _ in range(workers)]
    for worker, entries in enumerate(selected):
        for index, value in entries.items():
            held[worker][block[index]][index] = np.float32(value)

    def sent(worker, each):
        return _cut(held[worker][each], share, cut_off[worker])

    lengths = []
    ahead = workers  # blocks, from this worker's on, of which it has parts
    while ahead > 1:
        distance = 1
        while 2 * distance < ahead:
            distance *= 2
        messages = []
        for worker in range(workers):
            going = [(worker + d) % workers for d in range(distance, ahead)]
            messages.append({each: sent(worker, each) for each in going})
        lengths.append([sum(map(len, message.values())) for message in messages])
        for worker, message in enumerate(messages):
            for each, entries in message.items():
                _add(held[(worker + distance) % workers][each], entries)
        ahead = distance

    owned = [sent(worker, worker) for worker in range(workers)]
    lengths.append([len(entries) for entries in owned])
    total = _vector({i: v for entries in owned for i, v in entries.items()}, size)
    kept = np.where(total != 0, cut_off, 0)
    for worker, entries in enumerate(selected):
        for index, value in entries.items():
            if total[index] == 0:
                kept[worker, index] = value
    return total, kept, lengths


def row_topk(selected: list[dict[int, float]], piece: np.ndarray, share: np.ndarray):
    """ADTopk's selection with a global selection for each row, at the owner of the row.

    Index i is in row (or in piece of a divided row) ``piece[i]``, of which ``share[i]`` entries are
    delivered. The owner adds up the entries of all workers, in their order.
    """
    kept, sums = np.zeros((len(selected), len(piece))), {}
    for entries in selected:
        _add(sums, {index: np.float32(value) for index, value in entries.items()})
    rows: dict[int, dict[int, float]] = {}
    for index in sorted(sums):
        rows.setdefault(piece[index], {})[index] = sums[index]
    total = np.zeros(len(piece), np.float32)
    for entries in rows.values():
        largest = _cut(entries, share[next(iter(entries))], np.zeros(len(piece)))
        for index, value in largest.items():
            total[index] = value
    for worker, entries in enumerate(selected):
        for index, value in entries.items():
            if total[index] == 0:
                kept[worker, index] = value
    return total, kept


def _cut(entries, k, dropped):
    """The k largest, lowest index first among equals, no zeros; the others are dropped."""
    order = sorted(entries, key=lambda index: (-abs(float(entries[index])), index))
    kept = {index: np.float32(entries[index]) for index in order[:k] if entries[index] != 0}
    for index in entries.keys() - kept.keys():
        dropped[index] += entries[index]
    return kept


def _add(entries, others):
    for index, value in others.items():
        entries[index] = entries[index] + value if index in entries else value


def _vector(entries, size):
    total = np.zeros(size, np.float32)
    for index, value in entries.items():
        total[index] = value
    return total
