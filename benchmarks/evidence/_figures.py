"""The figures of the page: the mean of the seeds, and a band from the least to the most of them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display
from ._curves import CURVES, Curves

# Of the files, beside the page.
FOLDER = "figures"


class Figure(NamedTuple):
    """One figure.

    Attributes:
      name: of its file, without the ending.
      title: above it on the page.
      caption: below it: what is seen, and where it is from.
      x: what is to the right.
      y: what is upwards.
      workers: to the right are numbers of workers, in powers of two.
      log: upwards is logarithmic.
      level: a thin line at this height, and what it is.
    """

    name: str
    title: str
    caption: str
    x: str
    y: str
    workers: bool = False
    log: bool = False
    level: tuple[float, str] | None = None


FIGURES = (
    Figure(
        "words",
        "Words of a step",
        "Ok-Topk, Table 1: words that a worker receives in a step, as multiples of k, read from "
        "the traced programs, slots included (n = 1,000,000, density 1 %).",
        "workers",
        "words / k",
        workers=True,
        log=True,
    ),
    Figure(
        "fill_in",
        "Fill-in",
        "SparCML, Figure 1: the share of all entries that any of the first P workers selects, in "
        "trainings, and as uniform selections would have it.",
        "workers",
        "entries of the sum / n",
        workers=True,
        log=True,
    ),
    Figure(
        "counts",
        "Selected and delivered",
        "Ok-Topk, Figure 6: what a worker selects (local) and all deliver (global), as multiples "
        "of k, in trainings of a small convolutional network. The paper's thresholds are reused "
        "for 32 steps; ours are exact at every step.",
        "step",
        "entries / k",
        log=True,
        level=(1.0, "k"),
    ),
    Figure(
        "xi",
        "xi",
        "Ok-Topk, Figure 5: the distance between what is applied and the top k of the whole, over "
        "the size of the gradient, P = 8. At a constant rate it stays below P as long as there is "
        "something to learn: the convolutional network knows its digits by heart after a third "
        "of the steps. With a rate that falls it grows at the end, for what waits was made at a "
        "larger one.",
        "step",
        "xi",
        log=True,
        level=(8.0, "P"),
    ),
    Figure(
        "missing_rows",
        "Rows without an entry",
        "ADTopk, Figure 2b: rows of an LSTM's matrices in which nothing is selected (mean of the "
        "matrices). What ADTopk misses are rows that have no gradient at all.",
        "density, %",
        "rows, %",
    ),
)


def draw(folder: Path, curves: Curves) -> list[Path]:
    """Writes all figures for which there is something to show, and returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for figure in FIGURES:
        lines = {c.line: curves.best(c) for c in CURVES if c.figure == figure.name}
        if any(lines.values()):
            files.append(folder / f"{figure.name}.png")
            _draw(figure, lines, files[-1])
    return files


def _draw(figure: Figure, lines: dict[str, list[dict[str, Any]]], path: Path) -> None:
    drawn, ((axes,),) = display.panels(1, 1, (9, 4))
    for line, series in lines.items():
        if series:
            x, values = series[0]["x"], np.array([one["y"] for one in series])
            (handle,) = axes.plot(x, values.mean(0), label=line, linewidth=1.4)
            if len(series) > 1:
                band = {"color": handle.get_color(), "alpha": 0.2, "linewidth": 0}
                axes.fill_between(x, values.min(0), values.max(0), **band)
    if figure.level:
        height, name = figure.level
        axes.axhline(height, color="black", linewidth=0.8, linestyle=":", label=name)
    axes.set(xlabel=figure.x, ylabel=figure.y)
    if figure.workers:
        display.logarithmic(axes)
    elif figure.log:
        axes.set_yscale("log")
    axes.grid(True, alpha=0.25)
    # Beside the panel it hides no line.
    drawn.legend(loc="outside right upper", fontsize=8)
    display.save(drawn, path)
