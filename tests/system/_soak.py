"""Thousands of steps over several processes, with everything that is hard on a sparse allreduce.

The processes train over jax.distributed and Gloo on one machine. Their gradients change every few
steps: even, all mass in one layer, on one worker or in one region, ties, zeros, tiny numbers, one
entry; four of a hundred steps have entries that are not finite, which skip the step, or, in a fifth
of the steps, are left out. The state is saved now and then, and the processes start again from a
checkpoint. All of it is checked:

- conservation, at every step: what was accumulated is what was delivered or kept. The largest
  difference at any entry is in units of a float32 rounding of that entry, at most 2P + 4 of them.
- replicas: the parameters have the same bits in every process, and are finite.
- counts: steps taken and skipped and entries dropped are those that the gradients ask for.
- memory: once a start has compiled both steps and written a checkpoint, the resident memory grows
  by no more than 16 MiB until the next start, and the pieces of memory that are mapped by no more
  than 64: the medians of the first and the last tenth of at least twenty reports.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common.processes import Process
from tests import groups

MORE_MEMORY, MORE_MAPS = 16.0, 64
# Of a single step; the first one compiles and has more.
DEADLINE = 120


class Settings(NamedTuple):
    """How long the soak is; the defaults are a short one.

    Attributes:
      steps: in all.
      processes: P.
      restarts: from a checkpoint, evenly spread.
      save_every: steps between two checkpoints.
      report_every: steps between two reports.
    """

    steps: int = 120
    processes: int = 2
    restarts: int = 1
    save_every: int = 500
    report_every: int = 5

    @classmethod
    def of_environment(cls) -> "Settings":
        """From SOAK_STEPS, SOAK_PROCESSES and so on, where they are set."""
        given = {name: os.environ.get(f"SOAK_{name.upper()}") for name in cls._fields}
        return cls(**{name: int(text) for name, text in given.items() if text is not None})


def soak(settings: Settings, folder: Path) -> dict[str, Any]:
    """Runs it, with checkpoints in the folder: what :func:`summary` says, and the seconds."""
    begin = time.monotonic()
    starts = settings.restarts + 1
    bounds = [round(settings.steps * i / starts) for i in range(starts + 1)]
    expected = {"count": 0, "skipped": 0, "dropped": 0}
    segments = []
    for first, last in zip(bounds, bounds[1:]):
        segments.append(_segment(settings, folder, first, last, expected))
        expected = segments[-1][0][-1]["expected"]
    return summary(segments, settings) | {"seconds": time.monotonic() - begin}


def _segment(
    settings: Settings, folder: Path, first: int, last: int, expected: dict[str, int]
) -> list[list[dict[str, Any]]]:
    """The reports of each process, from its start at step ``first`` to its end at ``last``."""
    given = {
        "folder": str(folder / "checkpoints"),
        "first": first,
        "last": last,
        "save_every": settings.save_every,
        "report_every": settings.report_every,
        "deadline": DEADLINE,
        "expected": expected,
    }
    with groups.group("tests.system._soak_worker", settings.processes, **given) as group:
        # Each process watches its own steps, so there is no deadline for all of them.
        for process in group:
            process.wait_for("finished", seconds=1e6)
        return [_reports(process) for process in group]


def _reports(process: Process) -> list[dict[str, Any]]:
    return [event for event in process.events if event["event"] == "report"]


def summary(segments: list[list[list[dict[str, Any]]]], settings: Settings) -> dict[str, Any]:
    """What the reports of all processes of all starts come to; the violations in words."""
    violations = []
    lines = [line for segment in segments for process in segment for line in process]
    worst = 0.0
    limit = 2 * settings.processes + 4
    for line in lines:
        # Written so that a NaN is a violation too.
        if not line["worst"] <= limit:
            violations.append(f"step {line['step']}: {line['worst']:.1f} roundings lost")
        worst = line["worst"] if not line["worst"] <= worst else worst
        if not line["finite"]:
            violations.append(f"step {line['step']}: parameters that are not finite")
        if line["found"] != line["expected"]:
            violations.append(
                f"step {line['step']}: counts {line['found']}, not {line['expected']}"
            )
    growth: dict[str, float] = {}
    for segment in segments:
        for same_step in zip(*segment):
            if len({line["params"] for line in same_step}) > 1:
                violations.append(f"step {same_step[0]['step']}: replicas differ")
        for index, process in enumerate(segment):
            for name, most in (("rss", MORE_MEMORY), ("maps", MORE_MAPS)):
                more = _growth([line[name] for line in process if line["settled"]])
                if more is not None:
                    growth[name] = max(growth.get(name, more), more)
                    if more > most:
                        violations.append(f"process {index}: {name} grew by {more:.1f}")
    last = segments[-1][0][-1]
    return {
        "steps": settings.steps,
        "processes": settings.processes,
        "starts": len(segments),
        "reports": len(lines),
        "counts": last["found"],
        "worst_roundings": worst,
        "most_roundings": limit,
        "rss_mib": round(max(line["rss"] for line in lines), 1),
        "maps": max(line["maps"] for line in lines),
        "rss_growth_mib": growth.get("rss"),
        "maps_growth": growth.get("maps"),
        "violations": violations,
    }


def _growth(samples: list[float]) -> float | None:
    """From the median of the first tenth to that of the last; None where there are few."""
    if len(samples) < 20:
        return None
    tenth = len(samples) // 10
    return round(statistics.median(samples[-tenth:]) - statistics.median(samples[:tenth]), 1)
