"""The figures of the page: the mean of the seeds, in a band from the lowest to the highest."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display
from ._code import Check
from ._predicted import BARS

# Next to the page.
FOLDER = "figures"


class Curve(NamedTuple):
    """One line of a figure; ``check(seed, quick) -> (x, y)``."""

    figure: str
    line: str
    check: Callable[[int, bool], Any]
    file = f"{FOLDER}/curves.json"
    seeds = 3

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{FOLDER}/{self.figure}"

    @property
    def key(self) -> dict[str, str]:
        """Identifies a result."""
        return {"figure": self.figure, "line": self.line}


# By name; figures.toml describes the fields.
_FILE = Path(__file__).with_name("figures.toml")
FIGURES: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
CURVES = tuple(
    Curve(figure, line, Check(*given))
    for figure, table in FIGURES.items()
    for line, given in table["lines"].items()
)


def draw(name: str, lines: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draws a figure from the measured series of each of its lines."""
    figure = FIGURES[name]
    drawn, ((axes,),) = display.panels(1, 1, (9, 4))
    below = np.zeros(len(BARS))
    for line, series in lines.items():
        values = np.array([one["y"] for one in series])
        if figure.get("bars"):
            axes.bar(np.arange(len(BARS)), values.mean(0), 0.7, bottom=below, label=line)
            below = below + values.mean(0)
            continue
        (handle,) = axes.plot(series[0]["x"], values.mean(0), label=line, linewidth=1.4)
        if len(series) > 1:
            band = {"color": handle.get_color(), "alpha": 0.2, "linewidth": 0}
            axes.fill_between(series[0]["x"], values.min(0), values.max(0), **band)
    if "level" in figure:
        height, text = figure["level"]
        axes.axhline(height, color="black", linewidth=0.8, linestyle=":", label=text)
    axes.set(xlabel=figure["x"], ylabel=figure["y"])
    if figure.get("workers"):
        display.logarithmic(axes)
    elif figure.get("log_x"):
        axes.set_xscale("log")
    if figure.get("bars"):
        axes.set_xticks(range(len(BARS)), BARS, fontsize=8, rotation=90)
    axes.set_yscale("log" if figure.get("log") else "linear")
    axes.grid(True, alpha=0.25)
    # Outside the panel it hides no line.
    drawn.legend(loc="outside right upper", fontsize=8)
    display.save(drawn, path)
