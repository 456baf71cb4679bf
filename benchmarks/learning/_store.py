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
        self._path, self._large = path, large
        self.runs: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.runs, whole = _read(path, needed)
            if not whole:
                path.write_text("".join(json.dumps(run) + "\n" for run in self.runs))

    def _find(self, **wanted: Any) -> list[dict[str, Any]]:
        return [run for run in self.runs if wanted.items() <= run.items()]

    def _best_rate(self, **case: Any) -> float | None:
        """The rate whose run of a case from seed 0 ended best; None without runs."""
        ended = [run for run in self._find(seed=0, **case) if math.isfinite(run["value"])]
        sign = -1 if self._large else 1
        return min(ended, key=lambda run: sign * run["value"])["rate"] if ended else None

    def best(self, **case: Any) -> list[dict[str, Any]]:
        """The runs of a case with the best rate, in the order of their seeds."""
        rate = self._best_rate(**case)
        found = [] if rate is None else self._find(rate=rate, **case)
        return sorted(found, key=lambda run: run["seed"])

    def missing(
        self, rates: Sequence[float], seeds: int, **case: Any
    ) -> Iterator[tuple[float, int]]:
        """Rates and seeds of what is not here: the best rate is known when all have been tried."""
        for seed in range(seeds):
            best = self._best_rate(**case)
            for rate in rates if seed == 0 else [] if best is None else [best]:
                if not self._find(rate=rate, seed=seed, **case):
                    yield rate, seed

    def add(self, run: dict[str, Any]) -> None:
        """Keeps a run, at once."""
        self.runs.append(run)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")


def _read(path: Path, needed: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """The runs, and whether the last line is whole: the program may have been ended in it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    runs = []
    for number, line in enumerate(lines, 1):
        try:
            run = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return runs, False
            raise InputError(f"{path}, line {number} is no JSON: {error}") from error
        missing = [name for name in needed if not isinstance(run, dict) or name not in run]
        if missing:
            raise InputError(f"{path}, line {number} is no run of this program: no {missing[0]!r}")
        runs.append(run)
    return runs, True
