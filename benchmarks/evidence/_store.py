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


def _true_or_false(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _numbers(value: Any) -> str | None:
    number = reports.number(nan=True)
    fits = isinstance(value, dict) and value and all(number(x) is None for x in value.values())
    return None if fits else "numbers by name"


_RESULT = {
    "claim": reports.text(),
    "mark": reports.text(),
    "code": reports.text(),
    "seed": reports.whole(0),
    "quick": _true_or_false,
    "numbers": _numbers,
    "seconds": reports.number(0),
    "versions": {name: reports.text() for name in _PACKAGES},
    "machine": {"system": reports.text(), "cores": reports.whole(1)},
    "date": reports.text(),
}


def code_of(claim: Claim) -> str:
    """The code that a claim is checked with, as it is now."""
    return fingerprint(claim.check, claim.data) if claim.check else ""


class Store:
    """The results in a folder."""

    def __init__(self, folder: Path, code: Callable[[Claim], str] = code_of):
        """Reads what is there.

        Args:
          folder: of the files.
          code: which code a claim is checked with.

        Raises:
          InputError: a file is of another format, or no file of this program.
        """
        self.folder = folder
        self._code = code
        self._files: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.json")):
            self._files[path.stem] = _read(path)

    def results(self, claim: Claim, quick: bool | None = None) -> list[dict[str, Any]]:
        """Those of a claim as it is now, by seed; of all runs, or of the quick or the full ones."""
        found = [
            result
            for results in self._files.values()
            for result in results
            if result["claim"] == claim.id and result["mark"] == mark(claim)
            if quick in (None, result["quick"])
        ]
        return sorted(found, key=lambda result: result["seed"])

    def has(self, claim: Claim, seed: int, quick: bool) -> bool:
        """Whether there is a result of this code; a full one does for a quick one."""
        return any(
            result["seed"] == seed and (quick or not result["quick"])
            for result in self.results(claim)
            if result["code"] == self._code(claim)
        )

    def old(self, claim: Claim) -> bool:
        """Whether any of the results that count is older than the code."""
        return any(result["code"] != self._code(claim) for result in self.best(claim))

    def best(self, claim: Claim) -> list[dict[str, Any]]:
        """The full results of a claim; the quick ones where there are none."""
        return self.results(claim, quick=False) or self.results(claim, quick=True)

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
        same = (claim.id, seed, quick)
        file = claim.id.partition("/")[0]
        kept = [r for r in self._files.get(file, []) if (r["claim"], r["seed"], r["quick"]) != same]
        kept = sorted([*kept, result], key=lambda r: (r["claim"], r["quick"], r["seed"]))
        self.folder.mkdir(parents=True, exist_ok=True)
        reports.write(self.folder / f"{file}.json", {"format": FORMAT, "results": kept})
        self._files[file] = kept

    def forget_all_but(self, claims: Sequence[Claim]) -> None:
        """Drops the results of claims that are no more, or of settings that were others."""
        marks = {(claim.id, mark(claim)) for claim in claims if claim.check}
        for file, results in self._files.items():
            kept = [result for result in results if (result["claim"], result["mark"]) in marks]
            if len(kept) < len(results):
                reports.write(self.folder / f"{file}.json", {"format": FORMAT, "results": kept})
                self._files[file] = kept


def _read(path: Path) -> list[dict[str, Any]]:
    content = reports.read(path, {"format": reports.whole(0)}, _SOURCE)
    if content["format"] != FORMAT:
        raise InputError(
            f"{path} has format {content['format']}, and this program reads and writes {FORMAT}: "
            "move the file away, or use the version that wrote it"
        )
    return reports.read(path, {"results": (_RESULT,)}, _SOURCE)["results"]
