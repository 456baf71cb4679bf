"""Curves of the best runs: against steps, words that a worker has received, or seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display


class Line(NamedTuple):
    """What is drawn of a contestant: its runs, one for each seed.

    ``group`` is with which others: P, None where it is the same for all; or a link.
    """

    name: str
    group: Any
    runs: Sequence[dict[str, Any]]

    def mean(self, what: str) -> np.ndarray:
        """The ``values`` or ``seconds`` of the curve, on average over the seeds."""
        curves = [run["curve"] for run in self.runs]
        # A run that was made with another number of points is left out.
        alike = [curve for curve in curves if len(curve["steps"]) == len(curves[0]["steps"])]
        return np.mean([curve[what] for curve in alike], axis=0)

    def points(self, x: Any) -> list[tuple[float, float]]:
        """The curve without its beginning."""
        return list(zip(x[1:], self.mean("values")[1:], strict=True))


def draw(path: Path, title: str, measure: str, lines: Sequence[Line], workers: list[int]) -> None:
    """A PNG with a row for each number of workers: against steps, and against words."""
    figure, panels = display.panels(len(workers), 2, (11, 0.8 + 3.2 * len(workers)), sharey=True)
    for row, count in zip(panels, workers, strict=True):
        steps, words = {}, {}
        for line in lines:
            if line.group not in (None, count):
                continue
            run = line.runs[0]
            taken, size = np.array(run["curve"]["steps"]), run["curve"]["size"]
            steps[line.name] = line.points(taken)
            # A dense run is one for all numbers of workers, and its words are not.
            received = 2 * size * (count - 1) / count if line.group is None else run["words"]
            # Without words a line keeps its colour.
            words[line.name] = [] if received is None else line.points(taken * received / size)
        display.curves(row[0], steps, xlabel="steps", ylabel=f"{measure}, P = {count}")
        what = "words received by a worker, as multiples of n"
        display.curves(row[1], words, xlabel=what, xscale="log")
    if lines:
        # What is worse than after an eighth of a run says nothing about its end.
        ends = [line.mean("values")[i] for line in lines for i in (1, -1)]
        low, high = np.nanmin(ends), np.nanmax(ends)
        margin = 0.05 * (high - low) or 0.1
        panels[0][0].set_ylim(low - margin, high + margin)
        panels[0][0].legend(fontsize=7)
    display.save(figure, path, title)


def draw_links(path: Path, title: str, measure: str, lines: Sequence[Line]) -> None:
    """A PNG with a panel for each link: values against seconds, the mean of the seeds."""
    links = list(dict.fromkeys(line.group for line in lines))
    figure, panels = display.panels(1, max(1, len(links)), (1 + 5 * max(1, len(links)), 6.0))
    legend = {"ncols": 2, "loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}
    for axes, link in zip(panels[0], links, strict=False):
        here = {
            f"{line.name}, {line.runs[0]['rate']:g}": line.points(line.mean("seconds"))
            for line in lines
            if line.group == link
        }
        display.curves(axes, here, legend, xlabel="seconds of training", ylabel=measure, title=link)
    display.save(figure, path, title)
