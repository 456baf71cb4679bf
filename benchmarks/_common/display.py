"""Tables as text, and figures in files, without a window or a state of the program."""

from collections.abc import Mapping, Sequence
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


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of that size in inches and its axes, ``[rows, columns]``.

    ``options`` are those of ``Figure.subplots``, such as ``sharey=True``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False, **options))


def curves(
    axes: Any, lines: Mapping[str, Sequence[tuple[Any, Any]]], legend: Any = None, **labels: Any
) -> None:
    """Draws lines through points, each in a style of its own; ``labels`` are those of the axes."""
    for i, (name, points) in enumerate(lines.items()):
        # There are ten colours.
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "marker": "."}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set(**labels)
    axes.grid(True, alpha=0.25)
    if legend is not None:
        axes.legend(fontsize=7, **legend)


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
