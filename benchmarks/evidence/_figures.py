"""The figures of the page: the mean of the seeds, and a band from the least to the most of them."""

import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._common import display
from ._claims import measuring
from ._curves import Curve, Curves
from ._predicted import BARS
from ._store import Result

# Of the files, beside the page.
FOLDER = "figures"


class Figure(NamedTuple):
    """One figure; figures.toml says what the fields are."""

    name: str
    title: str
    caption: str
    x: str
    y: str
    workers: bool = False
    log: bool = False
    log_x: bool = False
    level: tuple[float, str] | None = None
    bars: tuple[str, ...] = ()


def _read() -> tuple[tuple[Figure, ...], tuple[Curve, ...]]:
    """The figures of the file, and their lines."""
    path, figures, curves = Path(__file__).with_name("figures.toml"), [], []
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for line, spec in table.pop("lines").items():
            curves.append(Curve(name, line, *measuring(*spec)))
        bars = BARS if table.pop("bars", False) else ()
        figures.append(Figure(name, bars=bars, **table))
    return tuple(figures), tuple(curves)


FIGURES, CURVES = _read()


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


def _draw(figure: Figure, lines: dict[str, list[Result]], path: Path) -> None:
    drawn, ((axes,),) = display.panels(1, 1, (9, 4))
    below = np.zeros(len(figure.bars))
    for line, series in lines.items():
        if series and figure.bars:
            parts = np.array([one["y"] for one in series]).mean(0)
            axes.bar(np.arange(len(parts)), parts, 0.7, bottom=below, label=line)
            below = below + parts
        elif series:
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
    elif figure.log_x:
        axes.set_xscale("log")
    if figure.bars:
        axes.set_xticks(range(len(figure.bars)), figure.bars, fontsize=8, rotation=90)
    axes.set_yscale("log" if figure.log else "linear")
    axes.grid(True, alpha=0.25)
    # Beside the panel it hides no line.
    drawn.legend(loc="outside right upper", fontsize=8)
    display.save(drawn, path)
