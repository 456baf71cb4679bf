"""Fill-in: how the union of the workers' indices grows with their number.

SparCML (Renggli et al., SC 2019, https://arxiv.org/abs/1802.08021), appendix B.
"""

import functools
import math
from typing import NamedTuple


class Overlap(NamedTuple):
    """A measured union, from which the unions for other numbers of workers follow.

    Attributes:
      union: distinct indices in the selections of all workers, as a mean.
      workers: the number of these workers.
    """

    union: float
    workers: int


def check_counts(size: int, selected: int, workers: int) -> None:
    """Checks that 1 <= k <= n and P >= 1."""
    if size < 1:
        raise ValueError(f"size must be the number of gradient components, at least 1, got {size}.")
    if not 1 <= selected <= size:
        raise ValueError(f"selected must be a count from 1 to size={size}, got {selected}.")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")


def uniform_union(size: float, selected: float, workers: float) -> float:
    r"""Expected size of the union of P uniform and independent selections.

    .. math:: E[K] = n (1 - (1 - k/n)^P)

    This is the closed form of the sum over subsets in the paper's B.1. ``log1p`` and
    ``expm1`` keep it exact if k/n is tiny and P is large. An effective n may be fractional.
    """
    if selected >= size:
        return float(size)
    return -size * math.expm1(workers * math.log1p(-selected / size))


@functools.lru_cache(maxsize=64)
def effective_size(selected: int, overlap: Overlap) -> float:
    """The number of places n' among which uniform selections would give this union.

    Selections that overlap more than by chance fill in as if the gradient were
    shorter. n' is k if all workers select the same indices, and infinite if no two
    have an index in common. ``selected`` is k of the measurement.
    """
    union, workers = overlap
    if workers < 2:
        raise ValueError(f"overlap.workers must be at least 2, got {workers}.")
    if not selected <= union <= selected * workers:
        raise ValueError(
            f"overlap.union must be from {selected} to {selected * workers}, the distinct indices "
            f"that {workers} selections of {selected} can have, got {union:g}."
        )
    if union <= selected:
        return float(selected)
    # Beyond 1e15 the difference from no overlap at all is below the rounding error.
    low, high = math.log(selected), math.log(selected) + math.log(1e15)
    if uniform_union(math.exp(high), selected, workers) <= union:
        return math.inf
    for _ in range(200):
        middle = (low + high) / 2
        if uniform_union(math.exp(middle), selected, workers) < union:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def expected_union(
    size: int, selected: int, workers: int, *, overlap: Overlap | None = None
) -> float:
    """Expected number of distinct indices in the selections of P workers.

    Args:
      size: n.
      selected: k of each worker.
      workers: P.
      overlap: a union measured with this k at another number of workers. It fixes
        an effective size (:func:`effective_size`) that replaces n. None: uniform
        and independent indices, the worst case that SparCML assumes.

    Returns:
      E[K], in [k, min(n, k P)].

    Raises:
      ValueError: a count is out of its range.

    Examples:
      >>> round(expected_union(512, 64, 4), 6)
      211.875
      >>> round(expected_union(10**6, 10**4, 4, overlap=Overlap(15_000, 2)))
      18750
    """
    check_counts(size, selected, workers)
    if overlap is None:
        return uniform_union(size, selected, workers)
    places = effective_size(selected, overlap)
    union = selected * workers if math.isinf(places) else uniform_union(places, selected, workers)
    return float(min(size, union))
