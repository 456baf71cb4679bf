"""Times of steps."""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure

from benchmarks._common.timing import over
from benchmarks.network._report import breakdown

from ..tables._data import by, read
from ._style import SMALL, TEXT, color_of, draw_lines, end_at, name_ends

# Parts of a step: a name, its color, and the color of the name in it.
PARTS = {
    "rest": ("rest", "#d1d5db", "black"),
    "sparsification": ("sparsification", "#94a3b8", "black"),
    "communication": ("communication", "#334155", "white"),
}


def parts_of_steps(figure: Figure) -> None:
    """The time of a step in parts, over 1 Gbit/s and without a limit."""
    found, panels = read("breakdown_4.json"), figure.subplots(1, 2, sharey=True)
    at = by(found["points"], "method", "link")
    methods = list(dict.fromkeys(method for method, _ in at))
    titles = {"1gbit": "links of 1 Gbit/s", "none": "links without a limit"}
    for axes, (link, said) in zip(panels, titles.items(), strict=True):
        for place, method in enumerate(methods):
            point, left = at[method, link], 0.0
            seconds = breakdown(point, found)
            assert seconds is not None
            for part, (name, color, written) in PARTS.items():
                width = 1e3 * seconds[part]
                axes.barh(place, width, left=left, color=color, height=0.7)
                # The longest bar has room for the names.
                if method.endswith("narrow16") and link == "none":
                    middle = {"ha": "center", "va": "center"}
                    axes.text(left + width / 2, place, name, color=written, size=7, **middle)
                left += width
            gain = statistics.median(over(point["baseline_seconds"], point["seconds"]))
            axes.text(left, place, f" {gain:.2f}", va="center", fontsize=SMALL)
        axes.set_title(said, loc="left", fontsize=TEXT)
        axes.margins(x=0.18)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].invert_yaxis()
    figure.supxlabel("ms per step (the number: times as fast as dense)", fontsize=TEXT)


def predicted_steps(figure: Figure) -> None:
    """The time of a step by the number of workers, as the cost model predicts it."""
    at = by(read("scaling.json")["rows"], "network", "algorithm", "workers")
    networks, methods, workers = (list(dict.fromkeys(x)) for x in zip(*at, strict=True))
    panels = figure.subplots(1, len(networks), sharey=True)
    for axes, network in zip(panels, networks, strict=True):
        lines = []
        for name in methods:
            ms = [1e3 * at[network, name, p]["step"] for p in workers]
            lines.append((name, color_of(name), workers, ms))
        draw_lines(axes, lines)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(13, 16000), ylim=(8, 1.5e5), xticks=workers[::2])
        axes.minorticks_off()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.0f}")
        end_at(axes, workers[-1], "workers")
        axes.set_title(network, loc="left", fontsize=TEXT)
        name_ends(axes, lines)
    panels[0].set_ylabel("predicted ms per step")
