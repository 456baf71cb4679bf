"""Tables as text, and figures in files, without a window or a state of the program."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rows = [title]
    for line in (head, *lines):
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        rows.append("  ".join([first, *others]).rstrip())
    return "\n".join(rows)


def show(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints such a table."""
    print(f"\n{table(title, head, lines)}", flush=True)


def show_fields(title: str, fields: str, rows: Iterable[dict[str, Any]]) -> None:
    """Prints rows of a report, with a column for each of ``fields``.

    These have spaces between them; ``union.mean`` is a field in a field.
    """
    names = fields.split()

    def cell(row: Any, name: str) -> str:
        value = functools.reduce(lambda inner, key: inner[key], name.split("."), row)
        few = value if isinstance(value, list) else [value]
        return ", ".join("-" if x is None else x if isinstance(x, str) else f"{x:.6g}" for x in few)

    show(title, names, [[cell(row, name) for name in names] for row in rows])


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of that size in inches and its axes, ``[rows, columns]``.

    ``options`` are those of ``Figure.subplots``, such as ``sharey=True``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False, **options))


def draw(path: Path, *rows: Sequence[dict[str, Any]], title: str = "") -> None:
    """Rows of panels as a PNG.

    A panel has ``lines``, by name (x, y) or (x, y, style), and what ``Axes.set`` takes; with
    ``workers`` powers of two are to the right, and the scales are logarithmic.
    """
    figure, axes = panels(len(rows), len(rows[0]), (5.5 * len(rows[0]), 4.5 * len(rows)))
    for axis, panel in zip(axes.flat, (panel for row in rows for panel in row), strict=True):
        lines, workers = panel.pop("lines"), panel.pop("workers", False)
        for i, (name, (x, y, *style)) in enumerate(lines.items()):
            # There are ten colours.
            usual = f"C{i % 10}{('.-', '.--', '.:')[i // 10 % 3]}"
            axis.plot(x, y, *(style or [usual]), label=name, linewidth=1.3)
        axis.set(**panel)
        axis.grid(True, alpha=0.25)
        axis.legend(fontsize=7)
        if workers:
            logarithmic(axis)
    save(figure, path, title)


def logarithmic(axes: Any) -> None:
    """Powers of two to the right, such as numbers of workers, and a logarithmic scale upwards."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, alpha=0.25)


def save(figure: Any, path: Path, title: str = "") -> None:
    """Writes a PNG."""
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120, format="png")
