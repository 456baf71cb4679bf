"""The style of the figures, and names next to lines and points."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

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
    "muloco": "#4a044e",
    "sparseloco": "#be185d",
    "sparse_adamw": OURS,
    "bits": OURS,
    "every": OURS,
    "dense": DENSE,
    "ok_topk": "#0f766e",
    "topk_a": "#b45309",
    "gtopk": "#4d7c0f",
    "topk_dsa": "#7e22ce",
}
LOSS = "loss on held-out data"
# Places of a name: points to the right and upwards, and the side of the text that is there.
SIDES = [(6, 0, "left"), (-6, 0, "right")]
SIDES += [(x, y, "left" if x > 0 else "right") for y in (7, -7, 10, -10) for x in (5, -5)]
SIDES += [(0, 11, "center"), (0, -11, "center")]
# A line of a figure: its name, its color, x and y.
Line = tuple[str, str, Sequence[float], Sequence[float]]


def color_of(name: str) -> str:
    """The color of a contestant, by its name."""
    return next(color for part, color in COLORS.items() if part in name.lower())


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


def draw_lines(axes: Axes, lines: Iterable[Line]) -> None:
    for name, color, xs, ys in lines:
        rounds = "every" in name
        width, fill = (2 if color == OURS and not rounds else 1.3), "none" if rounds else "full"
        axes.plot(xs, ys, "o-", color=color, linewidth=width, markersize=3.5, fillstyle=fill)


def end_at(axes: Axes, most: float, text: str) -> None:
    """Ends the x axis where the lines end, with its name in the middle."""
    (low, _), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    axes.spines["bottom"].set_bounds(low, most)
    corner = axes.transScale.transform((most, bottom))
    axes.set_xlabel(text, x=axes.transLimits.transform(corner)[0] / 2)
