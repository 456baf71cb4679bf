"""Measurements one after another, within a time, of which none that was made is lost."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .._common import options, reports, timing
from ._runs import Run

BASE = "copy"
# A step begins without thresholds and residuals, and copies its state at first.
_WARM_UP = 12
# A round takes so many seconds, and all rounds of a contestant.
_ROUND, _ROUNDS = 0.02, 10.0
_CALLS = 20


class Session:
    """Times contestants beside the base, and writes the report to a file after each.

    In ``content`` rows, skipped and failed are filled. Nothing is begun when so many seconds have
    passed since ``start``, of ``time.monotonic()``.
    """

    def __init__(
        self, base: Run, content: dict[str, Any], path: Path, *, rounds: int, start: float,
        seconds: float,
    ):  # fmt: skip
        self.content = content | {"rows": [], "skipped": [], "failed": {}, "finished": False}
        self._base, self._path, self._rounds = base, path, rounds
        self._start, self._seconds, self._longest = start, seconds, 0.0
        _warm(base)

    def measure(self, part: str, name: str, make: Callable[[], Run]) -> None:
        """Makes and times a contestant, unless it may not end in time."""
        begin = time.monotonic()
        # The longest so far is all that is known of how long the next one takes.
        if begin - self._start + self._longest > self._seconds:
            self.content["skipped"].append(f"{part}: {name}")
        else:
            options.say(f"{part}: {name}")
            try:
                self.content["rows"].append({"part": part} | self._row(name, make()))
            except Exception as error:  # One that does not fit in memory must not end the rest.
                reason = (str(error) or type(error).__name__).splitlines()[0]
                self.content["failed"][f"{part}: {name}"] = reason
            self._longest = max(self._longest, time.monotonic() - begin)
        self._write()

    def finish(self) -> None:
        """Says in the file that nothing is to come."""
        self.content["finished"] = True
        self._write()

    def _row(self, name: str, run: Run) -> dict[str, Any]:
        _warm(run)
        single, _ = timing.seconds_of(run.call, 0)
        calls = min(_CALLS, max(1, int(_ROUND / single)))
        rounds = min(self._rounds, max(3, int(_ROUNDS / (calls * single))))
        times = timing.in_turns(
            {BASE: _repeated(self._base, calls), name: _repeated(run, calls)}, rounds
        )
        each = {key: [s / calls for s in seconds] for key, seconds in times.items()}
        _, row = timing.ratios(each, BASE)
        low, _, high = timing.quartiles(each[name])
        return row | {
            "min_ms": 1e3 * min(each[name]),
            "quartiles_ms": [1e3 * low, 1e3 * high],
            "copy_ms": 1e3 * statistics.median(each[BASE]),
            "share_of_copy": 1 / row["ratio"],
            "rounds": rounds,
            "calls": calls,
            "launches": run.launches() if jax.default_backend() == "gpu" else None,
        }

    def _write(self) -> None:
        taken = time.monotonic() - self._start
        reports.write(self._path, self.content | {"minutes": taken / 60})


def _warm(run: Run) -> None:
    for turn in range(_WARM_UP):
        jax.block_until_ready(run.call(turn))


def _repeated(run: Run, calls: int) -> Callable[[int], Any]:
    """As many calls, of which only the last is waited for: the host must not set the pace."""

    def turns(turn: int) -> Any:
        out = None
        for number in range(calls):
            out = run.call(turn + number)
        return out

    return turns
