"""Losses against seconds, bytes and deaths of workers."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..tables._data import by, read
from ..tables._learning import Best, losses_by_bytes
from ..tables._minutes import losses_by_time
from ._style import (
    DENSE,
    LOSS,
    OURS,
    SMALL,
    TEXT,
    Line,
    color_of,
    draw_lines,
    end_at,
    name_ends,
    name_points,
)

LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
# The runs of the losses by bytes have 4,000 steps, and a word 4 bytes.
_STEPS, _BYTES = 4000, 4
LATE = {
    "sparse_adamw density=0.5 every=30": "sparse_adamw(every=30), 50 %",
    "sparse_adamw density=0.5 every=10": "sparse_adamw(every=10), 50 %",
    "sparse_adamw beside=1 density=0.5 every=10": "every=10, 50 %, exchange hidden",
    "sparse_adamw": "sparse_adamw at each step",
    "diloco buckets=1 every=30 momentum=0 outer_rate=1": "DiLoCo, H = 30",
    "diloco buckets=1 every=10 momentum=0 outer_rate=1": "DiLoCo, H = 10",
    "PyTorch, PowerSGD(4)": "PyTorch PowerSGD(4)",
    "powersgd(1) before AdamW": "JAX powersgd(1)",
    "dense, float16": "JAX float16",
    "dense": "JAX dense",
}
DEATHS = {
    "killed one by one": ("workers come back\none by one", OURS),
    "all started again": ("all workers are\nstarted again", "#c2410c"),
    "undisturbed": ("undisturbed", DENSE),
}


def _line(one: Best, shown: str) -> Line:
    """The mean over the seeds, without the loss before the first step."""
    # Runs that were measured at fewer points than others are left out.
    points = max(len(run["curve"]["values"]) for run in one.runs)
    curves = [run["curve"] for run in one.runs if len(run["curve"]["values"]) == points]
    seconds, values = (
        np.mean([curve[key][1:] for curve in curves], axis=0) for key in ("seconds", "values")
    )
    return shown, color_of(one.name), seconds, values


def loss_against_time(figure: Figure) -> None:
    """Two minutes over both links."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (link, said) in zip(panels, LINKS.items(), strict=True):
        lines = [_line(x, _of_time(x.shown)) for x in losses_by_time(link, "learning_time.jsonl")]
        draw_lines(axes, lines)
        axes.set(xlim=(0, 215), ylim=(1.65, 3.25), xticks=range(0, 121, 30))
        end_at(axes, 120, "seconds")
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
    draw_lines(axes, lines)
    axes.set(xlim=(0, 190), ylim=(1.7, 3.6), xticks=range(0, 121, 30), ylabel=LOSS)
    axes.set_yticks([2, 2.5, 3, 3.5])
    end_at(axes, 120, "seconds")
    name_ends(axes, lines)


def loss_against_bytes(figure: Figure) -> None:
    """The losses of the tables, each with its name, of a wide and a narrow model."""
    wide, narrow = figure.subplots(2, height_ratios=(1.75, 1.25))
    _panel_of_bytes(wide, 128, (0.12, 30_000), (1.52, 1.77))
    _panel_of_bytes(narrow, 32, (0.03, 4000), (1.72, 2.08))
    narrow.set_xlabel("MB that a worker receives in 4,000 steps")
    said = "full: sparse_adamw at every step, by density\ndashed: with bits=(1, 3)\n"
    said += "open: sparse_adamw(every=...), by density"
    narrow.text(8, 2.03, said, color=OURS, fontsize=SMALL, va="top", linespacing=1.5)


def _panel_of_bytes(
    axes: Axes, width: int, xlim: tuple[float, float], ylim: tuple[float, float]
) -> None:
    found = losses_by_bytes(width)
    axes.axhline(found[0].mean, color=DENSE, linewidth=1, linestyle=":")
    points, curves = [], {"sparse_adamw": ("-", []), "bits": ("--", [])}
    for one in found:
        color, name = color_of(one.shown), one.shown.replace("`", "").replace(" before AdamW", "")
        name = name.replace("dense AdamW, float16", "float16").removesuffix(", one seed")
        x, y, marker = _STEPS * _BYTES * one.words / 1e6, one.mean, "o"
        if y > ylim[1]:
            # At the upper end, with its loss.
            name, y, marker = f"{name}: {y:.3f}", ylim[1] - 0.03 * (ylim[1] - ylim[0]), "^"
        else:
            low, high = min(one.losses), max(one.losses)
            axes.plot([x, x], [low, high], color=color, linewidth=2, alpha=0.3)
        fill = "none" if name.startswith("every") else "full"
        axes.plot(x, y, marker, color=color, markersize=5, fillstyle=fill)
        for of, (_, curve) in curves.items():
            curve += [(x, y)] if name.startswith(of) else []
        name = name.removeprefix("sparse_adamw, ").replace("bits=(1, 3)", "1+3 bits")
        points.append((name, color, x, y))
    for style, curve in curves.values():
        axes.plot(*zip(*curve, strict=True), style, color=OURS, linewidth=1.3, zorder=0)
    axes.set_xscale("log")
    axes.set(xlim=xlim, ylim=ylim, ylabel=LOSS)
    axes.xaxis.set_major_formatter("{x:,.5g}")
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
    end_at(axes, 12, "minutes")
    axes.text(deaths[0] + 0.1, 2.015, "each line: a worker is killed", fontsize=SMALL, va="top")
    name_ends(axes, lines)


def _smooth(values: np.ndarray, reach: int = 3) -> np.ndarray:
    """Means with a few points on both sides, as far as there are some."""
    spans = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return np.array([span.mean() for span in spans])
