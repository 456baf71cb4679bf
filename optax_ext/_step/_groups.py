"""Leaves joined to groups of about equal size, and a tree in such parts."""

from collections.abc import Sequence
from typing import Any

import jax
import optax


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


def split(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of the leaves in each of so many groups, in order; none is empty.

    Args:
      sizes: of the leaves, in any unit.
      count: of the groups; as many as leaves at most.
    """
    groups: list[list[int]] = [[]]
    filled, total = 0, sum(sizes)
    for i, size in enumerate(sizes):
        rest = len(sizes) - i
        # The next group begins with the leaf that reaches over its end by more than it is short of.
        full = (filled + size / 2) * count > total * len(groups)
        if groups[-1] and len(groups) < count and (full or rest <= count - len(groups)):
            groups.append([])
        groups[-1].append(i)
        filled += size
    return groups


def parts(tree: Any, groups: Sequence[Sequence[int]]) -> list[Any]:
    """For each group of leaves the tree, with ``MaskedNode`` in the place of the others."""
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
