"""Series of numbers behind the figures: measured like the claims, and kept beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._common import reports
from . import _store
from ._code import fingerprint
from ._store import FORMAT, KEPT, Kept

# Points of a line: more could not be seen.
_POINTS = 80
_SERIES = KEPT | {
    "figure": reports.text(),
    "line": reports.text(),
    "x": [reports.number()],
    "y": [reports.number()],
}
Points = tuple[np.ndarray, np.ndarray]


class Curve(NamedTuple):
    """One line of a figure, by their names; ``measure(seed, quick) -> (x, y)``."""

    figure: str
    line: str
    measure: Callable[[int, bool], Points]
    # Nothing is drawn at random, so that one seed is enough.
    exact: bool = False


def code_of(curve: Curve) -> str:
    """The code that a line is measured with, as it is now."""
    return fingerprint(curve.measure)


class Curves(Kept):
    """The series in a file."""

    def __init__(self, path: Path, code: Callable[[Curve], str] = code_of):
        series = _store.read(path, "series", _SERIES) if path.exists() else []
        super().__init__(path, ("figure", "line"), series, code)

    def add(self, curve: Curve, seed: int, quick: bool, points: Points) -> None:
        """Keeps a series, thinned to what can be seen."""
        x, y = _thinned(*points)
        short = [float(f"{value:.6g}") for value in x], [float(f"{value:.4g}") for value in y]
        self.keep(curve, seed, quick, x=short[0], y=short[1])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        reports.write(self.path, {"format": FORMAT, "series": self._results})


def _thinned(x: np.ndarray, y: np.ndarray) -> Points:
    """Means of as many runs of points as can be seen."""
    if len(x) <= _POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _POINTS)
    return np.array([x[p].mean() for p in parts]), np.array([y[p].mean() for p in parts])
