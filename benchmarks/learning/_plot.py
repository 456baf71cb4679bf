"""Curves of the best runs: against steps, and against the words that a worker has received."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import display


class Line(NamedTuple):
    """What is drawn of a contestant with one number of workers.

    Attributes:
      name: of the contestant.
      workers: P; None where it is the same for all.
      runs: from the store, one for each seed.
    """

    name: str
    workers: int | None
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
            if line.workers in (None, count):
                _curve(row, line, count, colors[line.name])
        row[0].set(xlabel="steps", ylabel=f"{measure}, P = {count}")
        row[1].set(xlabel="words received by a worker, as multiples of n", xscale="log")
        for axes in row:
            axes.grid(True, alpha=0.25)
    if lines:
        # What is worse than after an eighth of a run says nothing about its end.
        ends = [_values(line)[i] for line in lines for i in (1, -1)]
        low, high = np.nanmin(ends), np.nanmax(ends)
        margin = 0.05 * (high - low) or 0.1
        panels[0][0].set_ylim(low - margin, high + margin)
        panels[0][0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    display.save(figure, path)


def _values(line: Line) -> np.ndarray:
    # A run that was made with another number of points is left out.
    curves = [run["curve"] for run in line.runs]
    same = [curve for curve in curves if curve["steps"] == curves[0]["steps"]]
    return np.mean([curve["values"] for curve in same], axis=0)


def _curve(row: Any, line: Line, workers: int, color: str) -> None:
    run = line.runs[0]
    steps, size = np.array(run["curve"]["steps"]), run["curve"]["size"]
    # A dense run is one for all numbers of workers, and its words are not.
    words = 2 * size * (workers - 1) / workers if line.workers is None else run["words"]
    row[0].plot(steps[1:], _values(line)[1:], color=color, label=line.name)
    if words is not None:
        row[1].plot(steps[1:] * words / size, _values(line)[1:], color=color)
