"""Series of numbers behind the figures: measured like the claims, and kept beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._common import reports
from . import _store
from ._code import fingerprint
from ._store import FORMAT, KEPT, Kept, Result

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
        super().__init__(path, code)
        self._series = _store.read(path, "series", _SERIES) if path.exists() else []

    def of(self, what: Curve, quick: bool | None = None) -> list[Result]:
        """The series of a curve, one for each seed."""
        return [
            series
            for series in self._series
            if (series["figure"], series["line"]) == (what.figure, what.line)
            if quick in (None, series["quick"])
        ]

    def add(self, curve: Curve, seed: int, quick: bool, points: Points) -> None:
        """Keeps a series, thinned to what can be seen."""
        x, y = _thinned(*points)
        series = {
            "figure": curve.figure,
            "line": curve.line,
            "code": self._code(curve),
            "seed": seed,
            "quick": quick,
            "x": [float(f"{value:.6g}") for value in x],
            "y": [float(f"{value:.4g}") for value in y],
        }

        def place(series: Result) -> tuple[str, str, bool, int]:
            return series["figure"], series["line"], series["quick"], series["seed"]

        kept = [other for other in self._series if place(other) != place(series)]
        self._series = sorted([*kept, series], key=place)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        reports.write(self.path, {"format": FORMAT, "series": self._series})


def _thinned(x: np.ndarray, y: np.ndarray) -> Points:
    """Means of as many runs of points as can be seen."""
    if len(x) <= _POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _POINTS)
    return np.array([x[p].mean() for p in parts]), np.array([y[p].mean() for p in parts])
