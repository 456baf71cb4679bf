"""Series of numbers behind the figures: measured like the claims, and kept beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._common import reports
from .._common.options import InputError
from ._code import fingerprint

FORMAT = 2
_SOURCE = "benchmarks.evidence"
# Points of a line: more could not be seen.
_POINTS = 80
_PATTERN = {"format": reports.whole(0)}
_SERIES = {
    "series": (
        {
            "figure": reports.text(),
            "line": reports.text(),
            "code": reports.text(),
            "seed": reports.whole(0),
            "quick": lambda x: None if isinstance(x, bool) else "true or false",
            "x": [reports.number()],
            "y": [reports.number()],
        },
    )
}
Points = tuple[np.ndarray, np.ndarray]


class Curve(NamedTuple):
    """One line of a figure.

    Attributes:
      figure: its file, without the ending.
      line: its name in the legend.
      measure: ``measure(seed, quick) -> (x, y)``.
      exact: nothing is drawn at random, so that one seed is enough.
    """

    figure: str
    line: str
    measure: Callable[[int, bool], Points]
    exact: bool = False


def code_of(curve: Curve) -> str:
    """The code that a line is measured with, as it is now."""
    return fingerprint(curve.measure)


class Curves:
    """The series in a file."""

    def __init__(self, path: Path, code: Callable[[Curve], str] = code_of):
        """Reads what is there.

        Args:
          path: of the file.
          code: which code a line is measured with.

        Raises:
          InputError: the file is of another format, or no file of this program.
        """
        self.path = path
        self._code = code
        self._series: list[dict[str, Any]] = []
        if path.exists():
            found = reports.read(path, _PATTERN, _SOURCE)["format"]
            if found != FORMAT:
                raise InputError(
                    f"{path} has format {found}, and this program reads and writes {FORMAT}: "
                    "move the file away, or use the version that wrote it"
                )
            self._series = reports.read(path, _SERIES, _SOURCE)["series"]

    def of(self, curve: Curve, quick: bool | None = None) -> list[dict[str, Any]]:
        """The series of a curve, one for each seed; of all runs, or of the quick or full ones."""
        return [
            series
            for series in self._series
            if (series["figure"], series["line"]) == (curve.figure, curve.line)
            if quick in (None, series["quick"])
        ]

    def has(self, curve: Curve, seed: int, quick: bool) -> bool:
        """Whether there is a series of this code; a full one does for a quick one."""
        return any(
            series["seed"] == seed and (quick or not series["quick"])
            for series in self.of(curve)
            if series["code"] == self._code(curve)
        )

    def old(self, curve: Curve) -> bool:
        """Whether any of the series that are drawn is older than the code."""
        return any(series["code"] != self._code(curve) for series in self.best(curve))

    def best(self, curve: Curve) -> list[dict[str, Any]]:
        """The full series of a curve; the quick ones where there are none."""
        return self.of(curve, quick=False) or self.of(curve, quick=True)

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

        def place(series: dict[str, Any]) -> tuple[Any, ...]:
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
