"""Curves of the best runs: against steps, and against the words that a worker has received."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display


class Line(NamedTuple):
    """What is drawn of a contestant.

    Attributes:
      name: of the contestant.
      group: with which others it is drawn: P, None where it is the same for all; or a link.
      runs: from the store, one for each seed.
    """

    name: str
    group: Any
    runs: Sequence[dict[str, Any]]


def draw(path: Path, title: str, measure: str, lines: Sequence[Line], workers: list[int]) -> None:
    """A PNG with a row for each number of workers, and the mean of the seeds.

    Args:
      path: of the file.
      title: above all.
      measure: what the values are.
      lines: what to draw.
      workers: the numbers of workers.
    """
    figure, panels = display.panels(len(workers), 2, (11, 0.8 + 3.2 * len(workers)), sharey=True)
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(line.name for line in lines))}
    for row, count in zip(panels, workers, strict=True):
        for line in lines:
            if line.group in (None, count):
                _curve(row, line, count, colors[line.name])
        row[0].set(xlabel="steps", ylabel=f"{measure}, P = {count}")
        row[1].set(xlabel="words received by a worker, as multiples of n", xscale="log")
        for axes in row:
            axes.grid(True, alpha=0.25)
    if lines:
        # What is worse than after an eighth of a run says nothing about its end.
        ends = [values_of(line)[i] for line in lines for i in (1, -1)]
        low, high = np.nanmin(ends), np.nanmax(ends)
        margin = 0.05 * (high - low) or 0.1
        panels[0][0].set_ylim(low - margin, high + margin)
        panels[0][0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    display.save(figure, path)


def draw_links(path: Path, title: str, measure: str, lines: Sequence[Line]) -> None:
    """A PNG with a panel for each link: values against seconds, the mean of the seeds.

    Args:
      path: of the file.
      title: above all.
      measure: what the values are.
      lines: what to draw.
    """
    links = list(dict.fromkeys(line.group for line in lines))
    figure, panels = display.panels(1, max(1, len(links)), (1 + 5 * max(1, len(links)), 6.0))
    names = enumerate(dict.fromkeys(line.name for line in lines))
    # There are ten colors.
    styles = {
        name: {"color": f"C{i}", "linestyle": ("-", "--", ":")[i // 10 % 3]} for i, name in names
    }
    for axes, link in zip(panels[0], links, strict=False):
        here = [line for line in lines if line.group == link]
        for line in here:
            label = f"{line.name}, {line.runs[0]['rate']:g}"
            seconds, values = seconds_of(line)[1:], values_of(line)[1:]
            axes.plot(seconds, values, label=label, marker=".", **styles[line.name])
        axes.set(xlabel="seconds of training", ylabel=measure, title=link)
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle(title, fontsize=10)
    display.save(figure, path)


def values_of(line: Line) -> np.ndarray:
    """The mean of the seeds at each point of the curve."""
    return np.mean([curve["values"] for curve in _alike(line)], axis=0)


def seconds_of(line: Line) -> np.ndarray:
    """When the points were, in the mean of the seeds."""
    return np.mean([curve["seconds"] for curve in _alike(line)], axis=0)


def _alike(line: Line) -> list[dict[str, Any]]:
    # A run that was made with another number of points is left out.
    curves = [run["curve"] for run in line.runs]
    return [curve for curve in curves if len(curve["steps"]) == len(curves[0]["steps"])]


def _curve(row: Any, line: Line, workers: int, color: str) -> None:
    run = line.runs[0]
    steps, size = np.array(run["curve"]["steps"]), run["curve"]["size"]
    # A dense run is one for all numbers of workers, and its words are not.
    words = 2 * size * (workers - 1) / workers if line.group is None else run["words"]
    row[0].plot(steps[1:], values_of(line)[1:], color=color, label=line.name)
    if words is not None:
        row[1].plot(steps[1:] * words / size, values_of(line)[1:], color=color)
