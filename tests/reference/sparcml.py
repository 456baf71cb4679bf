"""What SparCML states of its sums, in plain Python; it shares no code with the library."""

import math


def split(selected: list[dict[int, float]], size: int) -> list[set[int]]:
    """The split phase (5.3.2): the indices of each owner's sum, of ceil(n / P) or fewer."""
    width = math.ceil(size / len(selected))
    union = set().union(*selected)
    return [{i for i in union if i // width == owner} for owner in range(len(selected))]


def is_dense(selected, size: int, value_bytes: int, index_bytes: int) -> bool:
    """DSAR (5.3.3): whether an owner's sum passes its share of delta (5.1)."""
    width = math.ceil(size / len(selected))
    delta = width * value_bytes / (index_bytes + value_bytes)
    return max(len(owned) for owned in split(selected, size)) > delta


def expected_union(size: int, k: int, workers: int) -> float:
    """E[K] for k uniformly random indices a worker (appendix B.1), as the paper has it."""
    return size * sum(
        (-1) ** (i - 1) * math.comb(workers, i) * (k / size) ** i for i in range(1, workers + 1)
    )
