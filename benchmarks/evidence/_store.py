"""Results in JSON files, one for each paper: written whole, and read again only as written.

A result is kept as soon as its claim is checked with its seed, so that a run that was stopped goes
on where it was. A file of another format is refused, and so is one that does not hold together.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .._common import reports
from .._common.options import InputError
from ._claims import Claim, mark
from ._code import fingerprint

# Of the files; a change of what they hold is another one.
FORMAT = 2
_PACKAGES = ("sparse-collectives", "jax", "jaxlib", "numpy", "optax")
_SOURCE = "benchmarks.evidence"
Result = dict[str, Any]


def _true_or_false(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _numbers(value: Any) -> str | None:
    number = reports.number(nan=True)
    fits = isinstance(value, dict) and value and all(number(x) is None for x in value.values())
    return None if fits else "numbers by name"


# Of all that is kept.
KEPT = {"code": reports.text(), "seed": reports.whole(0), "quick": _true_or_false}
_RESULT = KEPT | {
    "claim": reports.text(),
    "mark": reports.text(),
    "numbers": _numbers,
    "seconds": reports.number(0),
    "versions": {name: reports.text() for name in _PACKAGES},
    "machine": {"system": reports.text(), "cores": reports.whole(1)},
    "date": reports.text(),
}


def read(path: Path, name: str, pattern: Any) -> list[Result]:
    """What is kept in a file under a name.

    Raises:
      InputError: the file is of another format, or no file of this program.
    """
    found = reports.read(path, {"format": reports.whole(0)}, _SOURCE)["format"]
    if found != FORMAT:
        raise InputError(
            f"{path} has format {found}, and this program reads and writes {FORMAT}: "
            "move the file away, or use the version that wrote it"
        )
    return reports.read(path, {name: (pattern,)}, _SOURCE)[name]


class Kept:
    """What was measured of claims, or of lines of figures, by seed.

    Args:
      path: of the files.
      code: which code something is measured with, as it is now.
    """

    def __init__(self, path: Path, code: Callable[[Any], str]):
        self.path = path
        self._code = code

    def of(self, what: Any, quick: bool | None = None) -> list[Result]:
        """All of one claim or line; of all runs, or of the quick or the full ones."""
        raise NotImplementedError

    def best(self, what: Any) -> list[Result]:
        """The full results; the quick ones where there are none."""
        return self.of(what, quick=False) or self.of(what, quick=True)

    def has(self, what: Any, seed: int, quick: bool) -> bool:
        """Whether there is a result of this code; a full one does for a quick one."""
        return any(
            result["seed"] == seed and (quick or not result["quick"])
            for result in self.of(what)
            if result["code"] == self._code(what)
        )

    def old(self, what: Any) -> bool:
        """Whether any of the results that count is older than the code."""
        return any(result["code"] != self._code(what) for result in self.best(what))


def code_of(claim: Claim) -> str:
    """The code that a claim is checked with, as it is now."""
    return fingerprint(claim.check, claim.data) if claim.check else ""


class Store(Kept):
    """The results of claims in a folder."""

    def __init__(self, path: Path, code: Callable[[Claim], str] = code_of):
        super().__init__(path, code)
        files = sorted(path.glob("*.json"))
        self._files = {file.stem: read(file, "results", _RESULT) for file in files}

    def of(self, what: Claim, quick: bool | None = None) -> list[Result]:
        """Those of a claim as it is now, by seed."""
        found = [
            result
            for results in self._files.values()
            for result in results
            if (result["claim"], result["mark"]) == (what.id, mark(what))
            if quick in (None, result["quick"])
        ]
        return sorted(found, key=lambda result: result["seed"])

    def add(
        self, claim: Claim, seed: int, quick: bool, numbers: Mapping[str, float], seconds: float
    ) -> None:
        """Keeps a result, in place of one of the same claim, seed and kind."""
        result = {
            "claim": claim.id,
            "mark": mark(claim),
            "code": self._code(claim),
            "seed": seed,
            "quick": quick,
            "numbers": {name: float(f"{value:.6g}") for name, value in numbers.items()},
            "seconds": round(seconds, 1),
            "versions": {name: metadata.version(name) for name in _PACKAGES},
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
            },
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }

        def place(result: Result) -> tuple[str, bool, int]:
            return result["claim"], result["quick"], result["seed"]

        file = claim.id.partition("/")[0]
        kept = [one for one in self._files.get(file, []) if place(one) != place(result)]
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(file, sorted([*kept, result], key=place))

    def forget_all_but(self, claims: Sequence[Claim]) -> None:
        """Drops the results of claims that are no more, or of settings that were others."""
        marks = {(claim.id, mark(claim)) for claim in claims if claim.check}
        for file, results in self._files.items():
            kept = [result for result in results if (result["claim"], result["mark"]) in marks]
            if len(kept) < len(results):
                self._write(file, kept)

    def _write(self, file: str, results: list[Result]) -> None:
        reports.write(self.path / f"{file}.json", {"format": FORMAT, "results": results})
        self._files[file] = results
