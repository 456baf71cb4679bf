"""Prints tables as text and writes figures to files, without a window or global state."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
# A row with more fields is printed as lines, and a field with more numbers counts as a series.
_COLUMNS, _SERIES = 14, 10


def show(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a table with its first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    print(f"\n{title}")
    for line in (head, *lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip(), flush=True)


def show_rows(title: str, rows: Iterable[Row], digits: int = 4) -> None:
    """Prints rows of a report with a column for each field, and numbers with so many digits.

    A nested field becomes a column of its own, and a series is left out. If there are many fields,
    each gets a line instead.
    """

    def cell(value: Any) -> str:
        if isinstance(value, list | tuple):
            return ", ".join(map(cell, value))
        if value is None or isinstance(value, str):
            return value or "-"
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"

    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row)) or ["nothing"]
    lines = [names, *([cell(row.get(name)) for name in names] for row in flat)]
    head, *lines = list(zip(*lines, strict=True)) if len(names) > _COLUMNS else lines
    show(title, head, lines)


def _flat(row: Row) -> Row:
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": x for inner, x in _flat(value).items()}
        elif np.ndim(value) == 0 or (np.ndim(value) == 1 and len(value) <= _SERIES):
            found[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return found


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Rows grouped by the values of these keys, or by one value if there is only one key."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        values = tuple(row[key] for key in keys)
        found.setdefault(values if len(keys) > 1 else values[0], []).append(row)
    return found


def show_crossed(
    title: str, rows: Sequence[Row], down: str, across: str, cell: Callable[[Row], str]
) -> None:
    """Prints a table with a line for each value of one field and a column for each of another."""
    at = {(row[down], row[across]): cell(row) for row in rows}
    columns = list(grouped(rows, across))
    lines = [[str(x), *(at.get((x, y), "-") for y in columns)] for x in grouped(rows, down)]
    show(title, [down, *(f"{across} {y}" for y in columns)], lines)


def lines_of(rows: Sequence[Row], name: str, x: str, y: str) -> dict[str, Any]:
    """The lines of a panel of :func:`draw`: ``y`` over ``x``, a line for each value of ``name``."""
    return {
        str(of): ([row[x] for row in own], [row[y] for row in own])
        for of, own in grouped(rows, name).items()
    }


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of that size in inches and its ``[rows, columns]``; options are for ``subplots``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False, **options))


def draw(path: Path | None, *rows: Sequence[Row], title: str = "") -> None:
    """Draws rows of panels as a PNG; does nothing if the path is None (the option was not given).

    A panel has ``lines``, by name (x, y) or (x, y, style), and arguments of ``Axes.set``. With
    ``workers``, the x axis shows powers of two and both scales are logarithmic.
    """
    if path is None:
        return
    figure, axes = panels(len(rows), len(rows[0]), (5.5 * len(rows[0]), 4.5 * len(rows)))
    for axis, panel in zip(axes.flat, (panel for row in rows for panel in row), strict=True):
        lines, workers = panel.pop("lines"), panel.pop("workers", False)
        for i, (name, (x, y, *style)) in enumerate(lines.items()):
            axis.plot(x, y, *(style or [style_of(i)]), label=name, linewidth=1.3)
        axis.set(**panel)
        axis.grid(True, alpha=0.25)
        axis.legend(fontsize=7)
        if workers:
            logarithmic(axis)
    save(figure, path, title)


def style_of(i: int) -> str:
    """The style of the i-th line; the palette repeats after ten lines."""
    return f"C{i % 10}{('.-', '.--', '.:')[i // 10 % 3]}"


def logarithmic(axes: Any) -> None:
    """A base-2 x axis, for numbers of workers for example, and a logarithmic y axis."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, alpha=0.25)


def save(figure: Any, path: Path, title: str = "") -> None:
    """Writes a PNG."""
    figure.suptitle(title or None, fontsize=10)
    figure.savefig(path, dpi=120, format="png")
