"""The collectives of a program, and their sum."""

from __future__ import annotations

from typing import Any, NamedTuple

# The path of the `jax.named_scope` names around an operation.
Scope = tuple[str, ...]


class CollectiveTraffic(NamedTuple):
    """One collective of the program, at one place.

    Attributes:
      kind: 'all_reduce', 'all_gather', 'all_to_all', 'reduce_scatter',
        'collective_permute' or 'collective_broadcast'.
      scope: the path of `jax.named_scope` names around it.
      words: words that a worker receives per execution (for
        'collective_permute' the mean over workers).
      weight: mean number of executions per call of the program.
      group_size: the number of workers that take part together.
      axes: the names of its axes.
    """

    kind: str
    scope: str
    words: float
    weight: float
    group_size: int
    axes: tuple[Any, ...] = ()


class Traffic(NamedTuple):
    """The words that a worker receives in one call of a program.

    Attributes:
      words: words received per worker and call, weighted.
      collectives: one row per collective, in program order; branches without
        weight are left out.
    """

    words: float
    collectives: tuple[CollectiveTraffic, ...]

    def by_scope(self, depth: int | None = None) -> dict[str, float]:
        """Weighted words per scope, in program order.

        Args:
          depth: how many components of each scope to keep; None keeps all.

        Returns:
          A dictionary from scope to words received per worker and call.
        """
        totals: dict[str, float] = {}
        for row in self.collectives:
            scope = "/".join(row.scope.split("/")[:depth])
            totals[scope] = totals.get(scope, 0.0) + row.words * row.weight
        return totals


def shown(scope: Scope) -> str:
    """The scope as part of a message."""
    return repr("/".join(scope)) if scope else "'' (no jax.named_scope around it)"
