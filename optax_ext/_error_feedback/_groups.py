"""Leaves in groups of about equal size, and trees split into such groups."""

from collections.abc import Sequence
from typing import Any

import jax
import optax


def grouped(sizes: list[int], buckets: int, kinds: list[Any]) -> list[list[int]]:
    """The numbers of the leaves in each bucket, the last leaves first.

    Args:
      sizes: the sizes of the leaves, in any unit.
      buckets: the approximate number of buckets.
      kinds: the kind of each leaf; leaves of different kinds are not joined.
    """
    wanted = sum(sizes) / buckets
    groups: list[list[int]] = []
    filled, kind = 0, None
    for i in reversed(range(len(sizes))):
        # With or without the leaf, whichever is closer to the wanted size.
        if not groups or kinds[i] != kind or filled + sizes[i] / 2 > wanted:
            groups.append([])
            filled, kind = 0, kinds[i]
        groups[-1].append(i)
        filled += sizes[i]
    return groups


def split(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of the leaves in each of ``count`` groups, in order; none is empty.

    Args:
      sizes: the sizes of the leaves, in any unit.
      count: the number of groups, at most the number of leaves.
    """
    groups: list[list[int]] = [[]]
    filled, total = 0, sum(sizes)
    for i, size in enumerate(sizes):
        rest = len(sizes) - i
        # A leaf whose middle lies beyond the end of the group begins the next one.
        full = (filled + size / 2) * count > total * len(groups)
        if groups[-1] and len(groups) < count and (full or rest <= count - len(groups)):
            groups.append([])
        groups[-1].append(i)
        filled += size
    return groups


def parts(tree: Any, groups: Sequence[Sequence[int]]) -> list[Any]:
    """The tree for each group of leaves, with ``MaskedNode`` instead of the other leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    made = []
    for group in groups:
        members = set(group)
        masked = [leaf if i in members else optax.MaskedNode() for i, leaf in enumerate(leaves)]
        made.append(jax.tree.unflatten(treedef, masked))
    return made


def joined(like: Any, made: Sequence[Any]) -> Any:
    """The inverse of :func:`parts`, in the tree of ``like``."""
    leaves, treedef = jax.tree.flatten(like)
    for part in made:
        for at, leaf in enumerate(treedef.flatten_up_to(part)):
            if not isinstance(leaf, optax.MaskedNode):
                leaves[at] = leaf
    return jax.tree.unflatten(treedef, leaves)
