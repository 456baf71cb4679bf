"""Leaves joined to groups of about equal size."""

from typing import Any


def grouped(sizes: list[int], buckets: int, kinds: list[Any]) -> list[list[int]]:
    """The numbers of the leaves in each bucket, the last leaves first.

    Args:
      sizes: of the leaves, in any unit.
      buckets: about how many to make.
      kinds: leaves of different kinds are not joined.
    """
    wanted = sum(sizes) / buckets
    groups: list[list[int]] = []
    filled, kind = 0, None
    for i in reversed(range(len(sizes))):
        # Whichever is nearer to the wanted size: with the leaf or without it.
        if not groups or kinds[i] != kind or filled + sizes[i] / 2 > wanted:
            groups.append([])
            filled, kind = 0, kinds[i]
        groups[-1].append(i)
        filled += sizes[i]
    return groups
