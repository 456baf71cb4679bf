"""What the runs of a contestant against seconds came to, as cells of a table."""

import numpy as np

from .._common.timing import quartiles
from . import _plot


def cells(line: _plot.Line, dense: _plot.Line | None, large: bool) -> list[str]:
    """A row of the table: a contestant over a link.

    Args:
      line: its runs.
      dense: those of the dense contestant over the link; None: there are none.
      large: whether a large value is a good one: an accuracy, in points.
    """
    runs, scale = line.runs, 100 if large else 1
    ended = scale * np.array([run["value"] for run in runs])
    worse = reached = "-"
    if dense is not None:
        other = scale * np.mean([run["value"] for run in dense.runs])
        worse = f"{other - ended.mean() if large else 100 * (ended.mean() / other - 1):+.2f}"
        at = when(_plot.seconds_of(line), _plot.values_of(line) * scale, float(other), large)
        reached = "-" if at is None else f"{at:.1f} s"
    # Wide quartiles are a sign of other work on the machine, which the run has paid for.
    each = [1e3 * part[1] for run in runs for part in run["curve"]["parts"] for _ in range(part[0])]
    low, middle, high = quartiles(each)
    return [
        line.name,
        f"{runs[0]['rate']:g}",
        str(len(runs)),
        f"{ended.mean():.3f}",
        f"{ended.std(ddof=1):.3f}" if len(ended) > 1 else "-",
        worse,
        reached,
        f"{middle:.1f}",
        f"{low:.1f} - {high:.1f}",
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
