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
      names: the fields of a result that say what it is of.
      results: those that there are.
      code: which code something is measured with, as it is now.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        results: Sequence[Result],
        code: Callable[[Any], str],
    ):
        self.path, self._names, self._results, self._code = path, names, list(results), code

    def key(self, what: Any) -> Result:
        """What a result of this has, as it is now."""
        return {name: getattr(what, name) for name in self._names}

    def of(self, what: Any, quick: bool | None = None) -> list[Result]:
        """All of one claim or line, by seed; of all runs, or of the quick or the full ones."""
        key = self.key(what).items()
        found = [result for result in self._results if key <= result.items()]
        kind = [result for result in found if quick in (None, result["quick"])]
        return sorted(kind, key=lambda result: result["seed"])

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

    def keep(self, what: Any, seed: int, quick: bool, **measured: Any) -> None:
        """Adds a result, in place of one of the same name, seed and kind."""
        result = self.key(what) | {"code": self._code(what), "seed": seed, "quick": quick}

        def place(result: Result) -> list[Any]:
            return [*(result[name] for name in self._names), result["quick"], result["seed"]]

        kept = [other for other in self._results if place(other) != place(result)]
        self._results = sorted([*kept, result | measured], key=place)


def code_of(claim: Claim) -> str:
    """The code that a claim is checked with, as it is now."""
    return fingerprint(claim.check, claim.data) if claim.check else ""


class Store(Kept):
    """The results of claims in a folder."""

    def __init__(self, path: Path, code: Callable[[Claim], str] = code_of):
        files = sorted(path.glob("*.json"))
        results = [result for file in files for result in read(file, "results", _RESULT)]
        super().__init__(path, ("claim",), results, code)

    def key(self, what: Claim) -> Result:
        """A claim as it is now: with another setting it is another one."""
        return {"claim": what.id, "mark": mark(what)}

    def add(
        self, claim: Claim, seed: int, quick: bool, numbers: Mapping[str, float], seconds: float
    ) -> None:
        """Keeps a result."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.keep(
            claim,
            seed,
            quick,
            numbers={name: float(f"{value:.6g}") for name, value in numbers.items()},
            seconds=round(seconds, 1),
            versions={name: metadata.version(name) for name in _PACKAGES},
            machine={"system": f"{platform.system()} {platform.machine()}", "cores": cores},
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
        )
        self._write(claim.id)

    def forget_all_but(self, claims: Sequence[Claim]) -> None:
        """Drops the results of claims that are no more, or of settings that were others."""
        known = [self.key(claim) for claim in claims if claim.check]
        kept = [x for x in self._results if {"claim": x["claim"], "mark": x["mark"]} in known]
        dropped = {result["claim"] for result in self._results if result not in kept}
        self._results = kept
        for claim in dropped:
            self._write(claim)

    def _write(self, claim: str) -> None:
        """The file that a claim is in."""
        paper = claim.partition("/")[0]
        results = [one for one in self._results if one["claim"].partition("/")[0] == paper]
        self.path.mkdir(parents=True, exist_ok=True)
        reports.write(self.path / f"{paper}.json", {"format": FORMAT, "results": results})
