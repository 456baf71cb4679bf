"""Results in JSON files, one for each paper and one for the lines of figures.

Each result is kept as soon as it is measured, so that an interrupted run continues from
there. A file of another format is refused: move it away, or use the version that wrote it.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .._common import reports
from ._claims import Claim
from ._figures import Curve

# The format of the files; it changes with their content.
FORMAT = 2
_PACKAGES = ("sparse-collectives", "jax", "jaxlib", "numpy", "optax")
# Points of a line; more would not be visible.
_POINTS = 80
Result = dict[str, Any]


def code_of(one: Claim | Curve) -> str:
    """The digest of the present code of a measurement."""
    return getattr(one.check, "code", "")


def _read(path: Path) -> list[Result]:
    name, result = _kind(path.name), {"code": reports.text(), "seed": reports.whole(0)}
    pattern: reports.Pattern = {"format": reports.whole(FORMAT, FORMAT), name: (result,)}
    return reports.read(path, pattern, "benchmarks.evidence")[name]


def _kind(file: str) -> str:
    return "series" if file.endswith("curves.json") else "results"


class Store:
    """The results in a folder."""

    def __init__(self, folder: Path):
        paths = [*folder.glob("*.json"), *folder.glob("figures/*.json")]
        self._folder = folder
        self._kept = {path.relative_to(folder).as_posix(): _read(path) for path in paths}

    def of(self, one: Claim | Curve, quick: bool) -> list[Result]:
        """The quick results or the full ones, by seed."""
        found = [x for x in self._kept.get(one.file, ()) if one.key.items() <= x.items()]
        return sorted((x for x in found if x["quick"] == quick), key=lambda x: x["seed"])

    def best(self, one: Claim | Curve) -> list[Result]:
        """The full results, or the quick ones if there are none."""
        return self.of(one, quick=False) or self.of(one, quick=True)

    def has(self, one: Claim | Curve, seed: int, quick: bool) -> bool:
        """Whether there is a result of this code; a full one also serves for a quick one."""
        found = self.of(one, False) + (self.of(one, True) if quick else [])
        return any(x["seed"] == seed and x["code"] == code_of(one) for x in found)

    def old(self, one: Claim | Curve) -> bool:
        """Whether any of the results that count is older than the code."""
        return any(x["code"] != code_of(one) for x in self.best(one))

    def add(self, one: Claim | Curve, seed: int, quick: bool, found: Any) -> None:
        """Keeps a result, which replaces the old one of the same seed and kind."""
        measured = _of_claim(found) if isinstance(one, Claim) else _of_curve(*found)
        result = one.key | {"code": code_of(one), "seed": seed, "quick": quick} | measured

        def place(x: Result) -> list[Any]:
            return [x.get(key, "") for key in ("claim", "figure", "line")] + [x["quick"], x["seed"]]

        others = [x for x in self._kept.get(one.file, ()) if place(x) != place(result)]
        self._write(one.file, sorted([*others, result], key=place))

    def forget_all_but(self, known: Sequence[Claim | Curve]) -> None:
        """Drops the results of removed claims and of changed settings."""
        keys = [one.key.items() for one in known if one.check]
        for file, results in list(self._kept.items()):
            kept = [x for x in results if any(key <= x.items() for key in keys)]
            if len(kept) < len(results):
                self._write(file, kept)

    def _write(self, file: str, results: list[Result]) -> None:
        self._kept[file], path = results, self._folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        reports.write(path, {"format": FORMAT, _kind(file): results})


def _of_claim(numbers: Mapping[str, float]) -> Result:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return {
        "numbers": {name: float(f"{value:.6g}") for name, value in numbers.items()},
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "machine": {"system": f"{platform.system()} {platform.machine()}", "cores": cores},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _of_curve(x: np.ndarray, y: np.ndarray) -> Result:
    """Means of consecutive points, at most as many as are visible."""
    parts = np.array_split(np.arange(len(x)), min(len(x), _POINTS))
    return {
        "x": [float(f"{x[part].mean():.6g}") for part in parts],
        "y": [float(f"{y[part].mean():.4g}") for part in parts],
    }
