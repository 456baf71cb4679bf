"""The allreduces of SparCML in plain NumPy, with messages of exact size.

Written from section 5 and the appendix of the paper; it shares no code with the
library. A sparse stream is a dictionary from index to value.
"""

import math

import numpy as np


def add(*streams: dict[int, float]) -> dict[int, float]:
    """The sum of sparse streams; the union of their indices, also where it cancels."""
    total: dict[int, float] = {}
    for stream in streams:
        for index, value in stream.items():
            total[index] = total.get(index, 0.0) + value
    return total


def recursive_double(selected: list[dict[int, float]]) -> list[dict[int, float]]:
    """SSAR_Recursive_double (5.3.1), and for any P the extra steps of appendix A.

    Returns what each worker ends with.
    """
    held = list(selected)
    members = 2 ** int(math.floor(math.log2(len(held))))
    surplus = range(members, len(held))
    for worker in surplus:
        held[worker - members] = add(held[worker - members], held[worker])
    distance = 1
    while distance < members:
        held[:members] = [add(held[i], held[i ^ distance]) for i in range(members)]
        distance *= 2
    for worker in surplus:
        held[worker] = held[worker - members]
    return held


def regions(size: int, workers: int) -> list[range]:
    """The indices of each owner: ceil(n / P), the last ones fewer or none."""
    width = math.ceil(size / workers)
    return [range(min(j * width, size), min((j + 1) * width, size)) for j in range(workers)]


def split(selected: list[dict[int, float]], size: int) -> list[dict[int, float]]:
    """The split phase (5.3.2): what each owner has after its sum."""
    return [
        add(*({i: v for i, v in stream.items() if i in region} for stream in selected))
        for region in regions(size, len(selected))
    ]


def split_allgather(selected: list[dict[int, float]], size: int) -> dict[int, float]:
    """SSAR_Split_allgather (5.3.2): disjoint sums are concatenated."""
    return {i: v for owned in split(selected, size) for i, v in owned.items()}


def is_dense(selected, size: int, value_bytes: int, index_bytes: int) -> bool:
    """DSAR (5.3.3): whether an owner's sum passes its share of delta (5.1)."""
    width = math.ceil(size / len(selected))
    delta = width * value_bytes / (index_bytes + value_bytes)
    return max(len(owned) for owned in split(selected, size)) > delta


def ring(selected: list[dict[int, float]], size: int) -> dict[int, float]:
    """A ring reduce-scatter of sparse regions, then their concatenation."""
    workers = len(selected)
    cut = [
        [{i: v for i, v in stream.items() if i in region} for region in regions(size, workers)]
        for stream in selected
    ]
    # Before step s worker w holds the sum of region w - 1 - s.
    held = [cut[w][(w - 1) % workers] for w in range(workers)]
    for step in range(workers - 1):
        arrived = [held[(w - 1) % workers] for w in range(workers)]
        held = [add(arrived[w], cut[w][(w - 2 - step) % workers]) for w in range(workers)]
    return {i: v for stream in held for i, v in stream.items()}


def expected_union(size: int, k: int, workers: int) -> float:
    """E[K] for k uniformly random indices a worker (appendix B.1), as the paper has it."""
    return size * sum(
        (-1) ** (i - 1) * math.comb(workers, i) * (k / size) ** i for i in range(1, workers + 1)
    )


def as_streams(sent: np.ndarray) -> list[dict[int, float]]:
    """The nonzero entries of each row of ``[P, n]``."""
    return [{int(i): float(row[i]) for i in np.flatnonzero(row)} for row in sent]


def as_vector(stream: dict[int, float], size: int) -> np.ndarray:
    """The stream as ``f64[n]``."""
    dense = np.zeros(size)
    dense[list(stream)] = list(stream.values())
    return dense
