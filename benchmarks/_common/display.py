"""Tables as text, and figures in files, without a window or a state of the program."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def show(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip(), flush=True)


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, ``[rows, columns]``.

    Args:
      rows: of panels.
      columns: of panels.
      size: of the figure, in inches.
      **options: of ``Figure.subplots``, such as ``sharey=True``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False, **options))


def logarithmic(axes: Any) -> None:
    """Powers of two to the right, such as numbers of workers, and a logarithmic scale upwards."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, alpha=0.25)


def save(figure: Any, path: Path) -> None:
    """Writes a PNG."""
    figure.savefig(path, dpi=120, format="png")
