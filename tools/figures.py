"""Figures of the manual, made of the files in docs/data.

    python -m tools.figures

All have one style: each line has its name at its end instead of a legend, a contestant has the
same color in every figure, and the text can be read at a width of 700 pixels.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from benchmarks._common import options
from benchmarks._common.processes import ROOT
from benchmarks._common.timing import over
from benchmarks.network._report import breakdown

from .tables._data import by, read
from .tables._learning import Timed, losses_by_bytes, losses_by_time

FOLDER = ROOT / "docs" / "images"
# Seven inches are 700 pixels on a page, so that a point is 1.4 pixels.
WIDTH, DPI, SMALL, TEXT = 7.0, 200, 8.0, 9.0
STYLE = {
    "font.size": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
}
OURS, DENSE = "#0b5cad", "#555555"
# The first that a name contains, in small letters.
COLORS = {
    "float16": "#4d7c0f",
    "powersgd(1)": "#e9a178",
    "powersgd(2)": "#d97741",
    "powersgd": "#c2410c",
    "streaming": "#a855c7",
    "diloco": "#7e22ce",
    "sparseloco": "#be185d",
    "sparse_adamw": OURS,
    "every": OURS,
    "dense": DENSE,
    "ok_topk": "#0f766e",
    "topk_a": "#b45309",
    "gtopk": "#4d7c0f",
    "topk_dsa": "#7e22ce",
}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
LOSS = "loss on held-out data"
# The runs of the losses by bytes have 4,000 steps, and a word 4 bytes.
_STEPS, _BYTES = 4000, 4
# Places of a name: points to the right and upwards, and the side of the text that is there.
SIDES = [(6, 0, "left"), (-6, 0, "right")]
SIDES += [(x, y, "left" if x > 0 else "right") for y in (7, -7, 10, -10) for x in (5, -5)]
SIDES += [(0, 11, "center"), (0, -11, "center")]
LATE = {
    "sparse_adamw density=0.5 every=30": "sparse_adamw(every=30), 50 %",
    "sparse_adamw density=0.5 every=10": "sparse_adamw(every=10), 50 %",
    "sparse_adamw beside=1 density=0.5 every=10": "every=10, 50 %, exchange hidden",
    "sparse_adamw": "sparse_adamw at each step",
    "diloco buckets=1 every=30 momentum=0 outer_rate=1": "DiLoCo, H = 30",
    "diloco buckets=1 every=10 momentum=0 outer_rate=1": "DiLoCo, H = 10",
    "PyTorch, PowerSGD(4)": "PyTorch PowerSGD(4)",
    "dense, float16": "JAX float16",
}
DEATHS = {
    "killed one by one": ("workers come back\none by one", OURS),
    "all started again": ("all workers are\nstarted again", "#c2410c"),
    "undisturbed": ("undisturbed", DENSE),
}
# Parts of a step: a name, its color, and the color of the name in it.
PARTS = {
    "rest": ("rest", "#d1d5db", "black"),
    "sparsification": ("sparsification", "#94a3b8", "black"),
    "communication": ("communication", "#334155", "white"),
}
WAYS = {"equal": "#c2410c", "balanced": "#0f766e"}
# A line of a figure: its name, its color, x and y.
Line = tuple[str, str, Sequence[float], Sequence[float]]


def color_of(name: str) -> str:
    """The color of a contestant, by its name."""
    return next(color for part, color in COLORS.items() if part in name.lower())


# Names next to what they name.


def name_ends(axes: Axes, lines: Iterable[Line], gap: float = 1.3) -> None:
    """Names at the ends of lines, moved apart vertically; call it after the limits are set.

    Args:
      axes: with room at the right.
      lines: that are drawn.
      gap: from one to the next, in heights of the text.
    """
    axes.figure.draw_without_rendering()
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    least = gap * SMALL / 72 * axes.figure.dpi
    found = sorted(lines, key=lambda line: line[3][-1])
    ends = [to_pixels((line[2][-1], line[3][-1])) for line in found]
    heights = [least * (name.count("\n") + 1) for name, *_ in found]
    gaps = [(one + other) / 2 for one, other in itertools.pairwise(heights)]
    places = _apart([y for _, y in ends], gaps, axes.bbox.y0 + heights[0] / 2)
    x = max(x for x, _ in ends) + SMALL / 72 * axes.figure.dpi
    for (name, color, xs, ys), place in zip(found, places, strict=True):
        axes.annotate(
            name,
            (xs[-1], ys[-1]),
            xytext=to_data((x, place)),
            color=color,
            fontsize=SMALL,
            va="center",
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.35, "relpos": (0, 0.5)},
        )


def _apart(wanted: Sequence[float], gaps: Sequence[float], least: float) -> list[float]:
    """Ordered places at least so far from each other and near those wanted: groups are centered."""
    offsets = [0.0, *itertools.accumulate(gaps)]
    groups: list[list[float]] = []
    # Without the gaps, places must not fall; the mean of a group is nearest to its own.
    for place, offset in zip(wanted, offsets, strict=True):
        groups.append([place - offset])
        while len(groups) > 1 and statistics.mean(groups[-2]) > statistics.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    flat = [max(statistics.mean(group), least) for group in groups for _ in group]
    return [place + offset for place, offset in zip(flat, offsets, strict=True)]


def name_points(axes: Axes, points: Sequence[tuple[str, str, float, float]]) -> None:
    """Names next to points, on the side with the fewest names, points and lines."""
    axes.figure.draw_without_rendering()
    marks = [axes.transData.transform((x, y)) for *_, x, y in points]
    taken = [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in marks]
    drawn = np.concatenate([_along(line) for line in axes.get_lines()])
    for name, color, x, y in points:
        tried = []
        for right, up, aligned in SIDES:
            text = axes.annotate(
                name,
                (x, y),
                xytext=(right, up),
                textcoords="offset points",
                color=color,
                fontsize=SMALL,
                ha=aligned,
                va="center",
            )
            box = text.get_window_extent()
            covered = 100 * sum(box.overlaps(other) for other in taken)
            covered += 100 * (box.x0 < axes.bbox.x0 or box.x1 > axes.bbox.x1)
            covered += box.padded(2).count_contains(drawn)
            tried.append((covered, len(tried), text, box))
        _, at, _, box = min(tried, key=lambda each: each[:2])
        taken.append(box)
        for _, other, text, _ in tried:
            if other != at:
                text.remove()


def _along(line: Line2D) -> np.ndarray:
    """Points along a line, two pixels apart."""
    corners = line.get_transform().transform(line.get_xydata())
    found = [corners]
    for start, end in itertools.pairwise(corners):
        steps = 2 + int(np.hypot(*(end - start)) / 2)
        found.append(start + np.linspace(0, 1, steps)[:, None] * (end - start))
    return np.concatenate(found)


# The figures.


def _line(one: Timed, shown: str) -> Line:
    """The mean over the seeds, without the loss before the first step."""
    seconds, values = (
        np.mean([run["curve"][key][1:] for run in one.runs], axis=0)
        for key in ("seconds", "values")
    )
    return shown, color_of(one.name), seconds, values


def _draw_lines(axes: Axes, lines: Iterable[Line]) -> None:
    for name, color, xs, ys in lines:
        rounds = "every" in name
        width, fill = (2 if color == OURS and not rounds else 1.3), "none" if rounds else "full"
        axes.plot(xs, ys, "o-", color=color, linewidth=width, markersize=3.5, fillstyle=fill)


def _end_at(axes: Axes, most: float, text: str) -> None:
    """Ends the x axis where the lines end, with its name in the middle."""
    (low, _), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    axes.spines["bottom"].set_bounds(low, most)
    corner = axes.transScale.transform((most, bottom))
    axes.set_xlabel(text, x=axes.transLimits.transform(corner)[0] / 2)


def loss_against_time(figure: Figure) -> None:
    """Two minutes over both links."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (link, said) in zip(panels, LINKS.items(), strict=True):
        lines = [_line(x, _of_time(x.shown)) for x in losses_by_time(link, "learning_time.jsonl")]
        _draw_lines(axes, lines)
        axes.set(xlim=(0, 215), ylim=(1.65, 3.25), xticks=range(0, 121, 30))
        _end_at(axes, 120, "seconds")
        axes.set_title(f"links of {said}", loc="left", fontsize=TEXT)
        name_ends(axes, lines)
    panels[0].set_ylabel(LOSS)


def _of_time(shown: str) -> str:
    if shown.startswith("JAX"):
        return "JAX float16"
    return shown.replace("`", "").replace(":", "").replace(" (DDP)", "")


def loss_against_late_time(figure: Figure) -> None:
    """Two minutes over links with a latency."""
    axes = figure.subplots()
    lines = [_line(x, LATE[x.name]) for x in losses_by_time("100mbit+50ms", "learning_late.jsonl")]
    _draw_lines(axes, lines)
    axes.set(xlim=(0, 190), ylim=(1.7, 3.6), xticks=range(0, 121, 30), ylabel=LOSS)
    axes.set_yticks([2, 2.5, 3, 3.5])
    _end_at(axes, 120, "seconds")
    name_ends(axes, lines)


def loss_against_bytes(figure: Figure) -> None:
    """The losses of the tables, each with its name, of a wide and a narrow model."""
    wide, narrow = figure.subplots(2, height_ratios=(1.35, 1.25))
    _panel_of_bytes(wide, 128, (0.9, 30_000), (1.52, 1.77))
    _panel_of_bytes(narrow, 32, (0.12, 4000), (1.72, 2.08))
    narrow.set_xlabel("MB that a worker receives in 4,000 steps")
    said = "full: sparse_adamw at every step, by density\nopen: sparse_adamw(every=...), by density"
    narrow.text(8, 2.03, said, color=OURS, fontsize=SMALL, va="top", linespacing=1.5)


def _panel_of_bytes(
    axes: Axes, width: int, xlim: tuple[float, float], ylim: tuple[float, float]
) -> None:
    found = losses_by_bytes(width)
    axes.axhline(statistics.mean(found[0].losses), color=DENSE, linewidth=1, linestyle=":")
    points, curve = [], []
    for one in found:
        color, name = color_of(one.shown), one.shown.replace("`", "").replace(" before AdamW", "")
        name = name.replace("dense AdamW, float16", "float16")
        x, y = _STEPS * _BYTES * one.words / 1e6, statistics.mean(one.losses)
        axes.plot([x, x], [min(one.losses), max(one.losses)], color=color, linewidth=2, alpha=0.3)
        fill = "none" if name.startswith("every") else "full"
        axes.plot(x, y, "o", color=color, markersize=5, fillstyle=fill)
        points.append((name.removeprefix("sparse_adamw, "), color, x, y))
        if name.startswith("sparse_adamw"):
            curve.append((x, y))
    axes.plot(*zip(*sorted(curve), strict=True), color=OURS, linewidth=1.3, zorder=0)
    axes.set_xscale("log")
    axes.set(xlim=xlim, ylim=ylim, ylabel=LOSS)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    title = f"width {width}, n = {found[0].size:,}"
    axes.text(0.99, 0.98, title, transform=axes.transAxes, fontsize=TEXT, ha="right", va="top")
    name_points(axes, points)


def loss_with_deaths(figure: Figure) -> None:
    """Trainings whose workers are killed; a line has a gap while no step is taken."""
    axes, lines, rows = figure.subplots(), [], by(read("chaos.json"), "mode")
    for mode, (name, color) in DEATHS.items():
        seconds, _, values = (np.array(x) for x in zip(*rows[mode]["points"], strict=True))
        gaps = 1 + np.flatnonzero(np.diff(seconds) > 6)
        smooth = np.concatenate([_smooth(part) for part in np.split(values, gaps)])
        minutes = seconds / 60
        for ys, width, alpha in ((values, 0.8, 0.3), (smooth, 1.8, 1)):
            xs, broken = (np.insert(x, gaps, np.nan) for x in (minutes, ys))
            axes.plot(xs, broken, color=color, linewidth=width, alpha=alpha)
        lines.append((f"{name},\n{rows[mode]['steps']:,} steps", color, minutes, smooth))
    deaths = [death["time"] / 60 for death in rows["killed one by one"]["deaths"]]
    for minute in deaths:
        axes.axvline(minute, color="black", alpha=0.15, linewidth=1.5, zorder=0)
    axes.set(xlim=(0, 16.5), ylim=(1.76, 2.02), xticks=range(0, 13, 2), ylabel=LOSS)
    _end_at(axes, 12, "minutes")
    axes.text(deaths[0] + 0.1, 2.015, "each line: a worker is killed", fontsize=SMALL, va="top")
    name_ends(axes, lines)


def _smooth(values: np.ndarray, reach: int = 3) -> np.ndarray:
    """Means with a few points on both sides, as far as there are some."""
    spans = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return np.array([span.mean() for span in spans])


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
        _draw_lines(axes, lines)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(13, 16000), ylim=(8, 1.5e5), xticks=workers[::2])
        axes.minorticks_off()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.0f}")
        _end_at(axes, workers[-1], "workers")
        axes.set_title(network, loc="left", fontsize=TEXT)
        name_ends(axes, lines)
    panels[0].set_ylabel("predicted ms per step")


def balance(figure: Figure) -> None:
    """The largest number of entries over the mean, in both phases."""
    runs = read("load_balance.json")["runs"]
    panels = figure.subplots(2, len(runs), sharex=True, sharey=True)
    for axes in panels.flat:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(14, 300), ylim=(0.9, 30), xticks=(16, 32, 64), yticks=(1, 2, 5, 10, 20))
        axes.minorticks_off()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.0f}")
    for (above, below), run in zip(panels.T, runs, strict=True):
        at = by(run["rows"], "regions", "workers")
        workers = sorted({p for _, p in at})
        received, ends = [], []
        for way, color in WAYS.items():
            rows = [at[way, p] for p in workers]
            received.append((way, color, workers, [row["received"] for row in rows]))
            series = {"before": [row["before"] for row in rows]}
            for mode in ("auto", "always"):
                series[mode] = [row["balance"][mode]["after"] for row in rows]
            for (name, ys), style in zip(series.items(), ("o-", "s--", "^:"), strict=True):
                below.plot(workers, ys, style, color=color, linewidth=1.3, markersize=3.5)
                ends.append((name, color, workers, ys))
        _draw_lines(above, received)
        name_ends(above, received)
        name_ends(below, ends[3:] if run is runs[0] else ends[:1])
        above.set_title(f"{run['run']},\n{run['case']}", loc="left", fontsize=SMALL)
        _end_at(below, workers[-1], "workers")
        _end_at(above, workers[-1], "")
    panels[0, 0].set_ylabel("received entries,\nlargest / mean")
    panels[1, 0].set_ylabel("entries in the allgather,\nlargest / mean")


DRAWN = {
    "learning_time_minutes.png": (loss_against_time, 3.9),
    "learning_late.png": (loss_against_late_time, 3.9),
    "learning_bytes.png": (loss_against_bytes, 8.8),
    "chaos.png": (loss_with_deaths, 3.9),
    "network.png": (parts_of_steps, 3.2),
    "scaling.png": (predicted_steps, 3.7),
    "load_balance.png": (balance, 4.2),
}


def draw(name: str, function: Callable[[Figure], None], height: float) -> None:
    """One figure, as a PNG."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    with rc_context(STYLE):
        function(figure)
    figure.savefig(FOLDER / name)


def main(argv: list[str] | None = None) -> int:
    """Draws them."""
    options.parser_of(__doc__).parse_args(argv)
    for name, (function, height) in DRAWN.items():
        draw(name, function, height)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
