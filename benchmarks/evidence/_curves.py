"""Series of numbers behind the figures: measured like the claims, and kept beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparse_collectives import cost_model

from .._common import reports
from .._common.options import InputError
from ..network import _volumes
from ..network.traffic import of_ok_topk
from ..training._measures import DENSITIES
from ._ok_topk_words import DENSITY, SIZE, WORKERS
from ._recording import DENSITIES as SELECTED
from ._recording import WORKERS as RECORDED
from ._recording import recording
from ._runs import xi
from ._selections import LAYERS
from ._trainings import counts

FORMAT = 1
_SOURCE = "benchmarks.evidence"
# Points of a line: more could not be seen.
_POINTS = 80
_PATTERN = {"format": reports.whole(0)}
_SERIES = {
    "series": (
        {
            "figure": reports.text(),
            "line": reports.text(),
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


def _words(name: str) -> Callable[[int, bool], Points]:
    def measure(_seed: int, _quick: bool) -> Points:
        rows = [(p, _volumes.of_algorithm(name, SIZE, DENSITY, p)) for p in WORKERS]
        found = [(p, row["worst"] / (DENSITY * SIZE)) for p, row in rows if row]
        return tuple(np.array(found).T)

    return measure


def _ok_topk_words(case: str) -> Callable[[int, bool], Points]:
    def measure(_seed: int, _quick: bool) -> Points:
        y = [of_ok_topk(SIZE, DENSITY, p, "raw")[case]["words"] for p in WORKERS]
        return np.array(WORKERS), np.array(y) / (DENSITY * SIZE)

    return measure


def _bound(_seed: int, _quick: bool) -> Points:
    workers = np.array(WORKERS)
    return workers, 6 * (workers - 1) / workers


def _counts(name: str, which: int) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        found = counts(name, seed, quick)[which]
        return np.arange(1, len(found) + 1), found

    return measure


def _xi(model: str, *, falls: bool = False) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        found = xi(0.01, seed, quick, model, falls)
        return np.arange(1, len(found) + 1), found

    return measure


def _union(name: str) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        unions = recording(name, seed, quick).unions.mean(0)
        return np.arange(1, len(unions) + 1), unions

    return measure


def _uniform(name: str) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        size = recording(name, seed, quick).size
        k, workers = max(1, round(SELECTED[name] * size)), range(1, RECORDED[name] + 1)
        return np.array(workers), np.array(
            [cost_model.expected_union(size, k, p) / size for p in workers]
        )

    return measure


def _missing(name: str) -> Callable[[int, bool], Points]:
    def measure(seed: int, quick: bool) -> Points:
        rates = recording("text", seed, quick).missing.rates("accumulator", name)
        return 100 * np.array(DENSITIES), 100 * np.array(rates["mean of matrices"])

    return measure


CURVES = (
    Curve("words", "TopkA", _words("topk_a"), exact=True),
    Curve("words", "TopkDSA, worst", _words("dsar_split_allgather"), exact=True),
    Curve("words", "gTopk", _words("gtopk"), exact=True),
    Curve("words", "bound of Ok-Topk, 6k (P-1)/P", _bound, exact=True),
    Curve("words", "Ok-Topk, worst step", _ok_topk_words("worst"), exact=True),
    Curve("words", "Ok-Topk, even step", _ok_topk_words("even"), exact=True),
    Curve("words", "dense", _words("dense"), exact=True),
    Curve("fill_in", "a small VGG, 1 %", _union("images")),
    Curve("fill_in", "uniform selections, 1 %", _uniform("images"), exact=True),
    Curve("fill_in", "an LSTM, 2 %", _union("text")),
    Curve("fill_in", "uniform selections, 2 %", _uniform("text"), exact=True),
    Curve("missing_rows", "top-k of each layer", _missing(LAYERS)),
    Curve("missing_rows", "ADTopk", _missing("adtopk")),
    Curve("counts", "paper's schedule, local", _counts("paper", 0)),
    Curve("counts", "paper's schedule, global", _counts("paper", 1)),
    Curve("counts", "Gaussiank, local", _counts("gaussian", 0)),
    Curve("counts", "ours, local and global", _counts("ok_topk_sgd", 1)),
    Curve("xi", "a convolutional network", _xi("digits")),
    Curve("xi", "an LSTM", _xi("lstm")),
    Curve("xi", "a transformer", _xi("transformer")),
    Curve("xi", "the LSTM, a rate that falls to 1 %", _xi("lstm", falls=True)),
)


class Curves:
    """The series in a file."""

    def __init__(self, path: Path):
        """Reads what is there.

        Raises:
          InputError: the file is of another format, or no file of this program.
        """
        self.path = path
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
        """Whether there is a series; a full one does for a quick one."""
        return any(x["seed"] == seed and (quick or not x["quick"]) for x in self.of(curve))

    def best(self, curve: Curve) -> list[dict[str, Any]]:
        """The full series of a curve; the quick ones where there are none."""
        return self.of(curve, quick=False) or self.of(curve, quick=True)

    def add(self, curve: Curve, seed: int, quick: bool, points: Points) -> None:
        """Keeps a series, thinned to what can be seen."""
        x, y = _thinned(*points)
        series = {
            "figure": curve.figure,
            "line": curve.line,
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
