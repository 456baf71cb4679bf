"""The plot: step times over the links, and the parts of a step."""

import statistics
from typing import Any

import _tables

PARTS = ("rest", "sparsification", "communication")


def draw(file: str, found: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Bars of step times for each number of workers, parameters and link, on one scale each.

    Methods whose step without an exchange was measured have their bar in three parts; the
    number at its end is the speed-up over the dense allreduce.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[tuple, list[dict[str, Any]]] = {}
    for point in found["points"]:
        groups.setdefault((point["workers"], point["params"], point["link"]), []).append(point)
    links = list(dict.fromkeys(link for _, _, link in groups))
    rows = list(dict.fromkeys((workers, params) for workers, params, _ in groups))
    height = 0.8 + 0.26 * max(map(len, groups.values()))
    size = (1.5 + 4.2 * len(links), 0.7 + height * len(rows))
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(links), squeeze=False)
    for row, (workers, params) in enumerate(rows):
        for column, link in enumerate(links):
            axes = panels[row][column]
            points = groups.get((workers, params, link), [])
            _bars(axes, points[::-1], found)
            name = "no limit" if link == "none" else link
            axes.set_title(f"P = {workers}, n = {params / 1e6:g}M, {name}", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file)


def _bars(axes, points: list[dict[str, Any]], found) -> None:
    longest = 0.0
    for y, point in enumerate(points):
        low, middle, high = (1e3 * x for x in _tables.quartiles(point["seconds"]))
        parts = _tables.breakdown(point, found)
        if parts is None:
            axes.barh(y, middle, color="0.75", label="step, parts not measured")
        else:
            left = 0.0
            for part, color in zip(PARTS, ("0.45", "tab:orange", "tab:blue"), strict=True):
                # Differences of medians: noise may make one of them negative.
                width = max(0.0, 1e3 * parts[part])
                axes.barh(y, width, left=left, color=color, label=part)
                left += width
        axes.plot([low, high], [y, y], color="black", linewidth=1)
        ratio = statistics.median(_tables.ratios(point))
        axes.annotate(f" {ratio:.2f}x", (max(high, middle), y), fontsize=7, va="center")
        longest = max(longest, high, middle)
    axes.set_yticks(range(len(points)), [point["method"] for point in points], fontsize=7)
    axes.set_xlim(0, 1.15 * longest)
    axes.set_xlabel("ms a step", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
