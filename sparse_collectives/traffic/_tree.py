"""A program as a tree of the nodes that decide how often each of its collectives runs.

The leaves are the collectives; conditionals and loops hold them. Each node has
its scope, the path of the `jax.named_scope` names around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

Scope = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    scope: Scope
    kind: str
    words: float  # received per worker and execution
    group_size: int
    axes: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Branches:
    scope: Scope
    branches: list[list[Node]]


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    scope: Scope
    trips: int | None  # None: not a constant of the program
    condition: list[Node]
    body: list[Node]


Node = Collective | Branches | Loop


def inside_out(scope: Scope, outer: Scope) -> Iterator[Scope]:
    """The paths to each name of `scope` that `outer` doesn't share, innermost first."""
    shared = 0
    while shared < min(len(scope), len(outer)) and scope[shared] == outer[shared]:
        shared += 1
    for end in range(len(scope), shared, -1):
        yield scope[:end]


def ending(path: Scope, names: Iterable[str]) -> list[str]:
    """The `names`, of one component or several, with which `path` ends; longest first."""
    ending = [name for name in names if f"/{'/'.join(path)}".endswith(f"/{name}")]
    return sorted(ending, key=len, reverse=True)


def shown(scope: Scope) -> str:
    """`scope` as part of a message."""
    return repr("/".join(scope)) if scope else "'' (no jax.named_scope around it)"
