"""The parts of a measurement: rows, sums and a table."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple


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

    def by_axes(self) -> dict[tuple[Hashable, ...], float]:
        """Weighted words per axis of the mesh, or per several axes of one collective.

        For example, an axis between sites and an axis inside them have different links.
        """
        totals: dict[tuple[Hashable, ...], float] = {}
        for row in self.collectives:
            totals[row.axes] = totals.get(row.axes, 0.0) + row.words * row.weight
        return totals

    def table(self) -> str:
        """A printable table: one line per distinct collective, and the total."""
        # Unrolled schedules repeat one collective hundreds of times.
        counts: dict[CollectiveTraffic, int] = {}
        for row in self.collectives:
            counts[row] = counts.get(row, 0) + 1
        head = ("scope", "collective", "group", "count", "words", "weight", "total")
        lines: list[tuple[str, ...]] = [head]
        for row, count in counts.items():
            lines.append(
                (
                    row.scope or "-",
                    row.kind,
                    str(row.group_size),
                    str(count),
                    f"{row.words:,.1f}",
                    f"{row.weight:.6g}",
                    f"{row.words * row.weight * count:,.1f}",
                )
            )
        lines.append(("total", "", "", "", "", "", f"{self.words:,.1f}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
