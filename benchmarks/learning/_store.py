"""Runs in a file of JSON lines, so that an experiment that was cut short goes on."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._common.options import InputError


class Store:
    """The runs of a file; with no path they are kept until the program ends.

    A run has what tells it from others, among that its ``rate`` and ``seed``, and the ``value``
    with which it ended. In each that is there all that is ``needed`` has to be; ``large`` says
    whether a large value is a good one.
    """

    def __init__(self, path: Path | None, needed: Sequence[str], large: bool):
        self._path, self._sign = path, -1 if large else 1
        self.runs = _read(path, needed) if path is not None and path.exists() else []

    def _find(self, **wanted: Any) -> list[dict[str, Any]]:
        return [run for run in self.runs if wanted.items() <= run.items()]

    def best(self, **case: Any) -> list[dict[str, Any]]:
        """The runs of a case in the order of their seeds, with the rate that is best for seed 0."""
        ended = [run for run in self._find(seed=0, **case) if math.isfinite(run["value"])]
        if not ended:
            return []
        rate = min(ended, key=lambda run: self._sign * run["value"])["rate"]
        return sorted(self._find(rate=rate, **case), key=lambda run: run["seed"])

    def missing(
        self, rates: Sequence[float], seeds: int, **case: Any
    ) -> Iterator[tuple[float, int]]:
        """Rates and seeds of what is not here: the best rate is known when all have been tried."""
        for seed in range(seeds):
            for rate in [run["rate"] for run in self.best(**case)[:1]] if seed else rates:
                if not self._find(rate=rate, seed=seed, **case):
                    yield rate, seed

    def add(self, run: dict[str, Any]) -> None:
        """Keeps a run, at once."""
        self.runs.append(run)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")


def _read(path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    """The runs; a last line that is not whole, in which the program was ended, is taken away."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    whole, end, cut_off = text.rpartition("\n")
    if cut_off:
        path.write_text(whole + end, encoding="utf-8")
    runs = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            run = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number} is no JSON: {error}") from error
        missing = [name for name in needed if not isinstance(run, dict) or name not in run]
        if missing:
            raise InputError(f"{path}, line {number} is no run of this program: no {missing[0]!r}")
        runs.append(run)
    return runs
