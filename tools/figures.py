"""Figures of the manual, made of the files in docs/data.

    python -m tools.figures

They have one style: labels beside what they name, and text that can be read at 700 pixels.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks._common import options
from benchmarks._common.processes import ROOT
from benchmarks.elastic import chaos

from .tables._learning import Trained, losses_by_bytes

FOLDER = ROOT / "docs" / "images"
OURS, OTHERS, DENSE = "#0b5cad", "#c2410c", "#555555"
# Of the runs of 4,000 steps.
_STEPS, _BYTES = 4000, 4


def loss_against_bytes(axes: Axes) -> None:
    """The losses of the table, each with its name."""
    found = losses_by_bytes()
    dense = statistics.mean(found[0].losses)
    axes.axhline(dense, color=DENSE, linewidth=1, linestyle=":")
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        color = DENSE if one is found[0] else OURS if "`" in one.shown else OTHERS
        at = _STEPS * _BYTES * one.words / 1e6, statistics.mean(one.losses)
        low, high = min(one.losses), max(one.losses)
        axes.plot([at[0]] * 2, [low, high], color=color, linewidth=1.5, alpha=0.5)
        axes.plot(*at, "o", color=color, markersize=5)
        axes.annotate(
            _short(one),
            at,
            xytext=(5, 3),
            textcoords="offset points",
            color=color,
            fontsize=7.5,
        )
        if "`sparse_adamw`" in one.shown:
            curves.setdefault("ours", []).append(at)
    for points in curves.values():
        axes.plot(*zip(*sorted(points), strict=True), color=OURS, linewidth=1, alpha=0.4)
    axes.set_xscale("log")
    axes.set(xlabel="MB that a worker receives in 4,000 steps", ylabel="loss on data held back")


def _short(one: Trained) -> str:
    return one.shown.replace("`", "").replace(" before AdamW", "").replace("sparse_adamw, ", "")


def draw(name: str, function: Callable[[Axes], None]) -> None:
    """One figure, as a PNG."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    function(axes)
    figure.savefig(FOLDER / name, dpi=140)


def main(argv: list[str] | None = None) -> int:
    """Draws them."""
    options.parser_of(__doc__).parse_args(argv)
    draw("learning_bytes.png", loss_against_bytes)
    rows = json.loads((ROOT / "docs" / "data" / "chaos.json").read_text(encoding="utf-8"))
    chaos.draw(rows, FOLDER / "chaos.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
