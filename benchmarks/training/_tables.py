"""Tables and figures of reports."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .._common import display


def show(title: str, fields: str, rows: Iterable[dict[str, Any]]) -> None:
    """Prints a table with a line for each row, and a column for each of its fields.

    Args:
      title: above it.
      fields: with spaces between them; ``union.mean`` is a field in a field.
      rows: of a report.
    """
    names = fields.split()

    def cell(row: Any, name: str) -> str:
        value = functools.reduce(lambda inner, key: inner[key], name.split("."), row)
        few = value if isinstance(value, list) else [value]
        return ", ".join("-" if x is None else x if isinstance(x, str) else f"{x:.6g}" for x in few)

    display.show(title, names, [[cell(row, name) for name in names] for row in rows])


def draw(path: Path, *rows: Sequence[dict[str, Any]]) -> None:
    """Draws rows of panels into a PNG.

    Args:
      path: of the file.
      *rows: each panel has ``lines``, (x, y, style, label) each, and what ``Axes.set`` takes.
    """
    size = (5.5 * len(rows[0]), 4.5 * len(rows))
    figure, axes = display.panels(len(rows), len(rows[0]), size)
    for axis, panel in zip(axes.flat, (panel for row in rows for panel in row), strict=True):
        for x, y, style, label in panel.pop("lines"):
            axis.plot(x, y, style, label=label, linewidth=1.3)
        axis.set(**panel)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    display.save(figure, path)
