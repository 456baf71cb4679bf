"""Tables and figures of reports: columns are formats of their fields, panels are lists of lines."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .._common import display


def show(title: str, columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> None:
    """Prints a table with a line for each row.

    Args:
      title: above it.
      columns: a format for each heading, such as ``"{union[mean]:.2%}"``.
      rows: what is formatted.
    """
    lines = [[form.format(**row) for form in columns.values()] for row in rows]
    display.show(title, list(columns), lines)


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
