"""What the runs of a contestant came to, as cells of a table."""

from typing import Any

import numpy as np

from .._common.timing import quartiles
from ._plot import Line


def ends(runs: Any, large: bool) -> list[str]:
    """Rate, number of seeds, mean and deviation of the values at the end."""
    ended = (100 if large else 1) * np.array([run["value"] for run in runs])
    deviation = f"{ended.std(ddof=1):.3f}" if len(ended) > 1 else "-"
    return [f"{runs[0]['rate']:g}", str(len(runs)), f"{ended.mean():.3f}", deviation]


def worse(value: float, other: float, large: bool) -> float:
    """By how much a value is worse: in points of an accuracy, or % of a loss."""
    return 100 * (other - value if large else value / other - 1)


def cells(line: Line, dense: Line | None, large: bool) -> list[str]:
    """A row of the table: a contestant over a link, beside the dense one where there is one.

    ``large`` says whether a large value is a good one: an accuracy, in points.
    """
    runs, by, reached = line.runs, "-", "-"
    if dense is not None:
        own, other = (float(np.mean([run["value"] for run in x.runs])) for x in (line, dense))
        by = f"{worse(own, other, large):+.2f}"
        at = when(line.mean("seconds"), line.mean("values"), other, large)
        reached = "-" if at is None else f"{at:.1f} s"
    # Wide quartiles are a sign of other work on the machine, which the run has paid for.
    each = [1e3 * part[1] for run in runs for part in run["curve"]["parts"] for _ in range(part[0])]
    low, middle, high = quartiles(each)
    return [
        *(line.name, *ends(runs, large), by, reached, f"{middle:.1f}", f"{low:.1f} - {high:.1f}"),
        f"{np.mean([run['received'] for run in runs]) / 1e6:.3f}",
        f"{np.mean([run['steps'] for run in runs]):.0f}",
    ]


def when(seconds: np.ndarray, values: np.ndarray, wanted: float, large: bool) -> float | None:
    """When a curve first is as good as wanted, between its points along a line; None: never."""
    good = values >= wanted if large else values <= wanted
    if not good.any():
        return None
    i = int(np.argmax(good))
    if i == 0:
        return float(seconds[0])
    part = (wanted - values[i - 1]) / (values[i] - values[i - 1])
    return float(seconds[i - 1] + part * (seconds[i] - seconds[i - 1]))
