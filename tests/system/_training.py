"""Runs of several workers: uninterrupted, with a fault, and resumed from a checkpoint."""

import os
import re
import time
from pathlib import Path
from typing import Any

from benchmarks._common.processes import Process
from tests import groups

WORKERS, STEPS, SAVE_EVERY = 3, 12, 3
# The fault comes in this step, and the last checkpoint before it is at step 6.
FAULT_STEP = 8
HEARTBEAT, DEADLINE, FIRST_DEADLINE = 20, 30, 500
# For a start, and for steps that nothing disturbs, on a machine that does other things too.
PATIENCE = 600


def workers(folder: Path, processes: int = WORKERS, **options: Any) -> Any:
    """The processes of one training, with checkpoints in the folder, for the length of the block.

    The options are of `groups.group`, and settings in place of the usual ones; see `_worker`.
    """
    usual = {
        "folder": str(folder),
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "resume": 0,
        "heartbeat": HEARTBEAT,
        "deadline": DEADLINE,
        "first_deadline": FIRST_DEADLINE,
        "hold_at": -1,
        "limit_at": -1,
    }
    # Programs are compiled once, and quickly.
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder.parent / "compiled"))
    variables = {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": kept,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    given = usual | options
    return groups.group("tests.system._worker", processes, variables=variables, **given)


def finished(group: list[Process]) -> None:
    """Waits until all have finished; raises RuntimeError where one ends in another way."""
    for process in group:
        process.wait_for("finished", seconds=PATIENCE)
    for process in group:
        if not process.wait_for_end(PATIENCE) or process.status != 0:
            raise RuntimeError(f"a worker finished, and then: {report(process)}")


def hashes(group: list[Process]) -> list[dict[int, str]]:
    """For each process, the hash of parameters and its part of the state after each step."""
    return [
        {e["step"] + 1: e["hash"] for e in process.events if e["event"] == "end"}
        for process in group
    ]


def reference(folder: Path) -> list[dict[int, str]]:
    """The hashes of a training that nothing disturbs."""
    with workers(folder) as group:
        finished(group)
        return hashes(group)


def ended(group: list[Process], since: float, bound: float) -> float | None:
    """Seconds after ``since`` at which the last of them ended; None if over the bound."""
    if not all(p.wait_for_end(max(since + bound - time.monotonic(), 0)) for p in group):
        return None
    return max(p.ended_at - since for p in group)


_WATCHDOG = r"optax_ext\.contrib\.Watchdog: "
_REASONS = (
    (_WATCHDOG + r"(.* did not end within .*?) on process", r"\1"),
    (_WATCHDOG + r"(.*?) failed on process.*? with (.*?)\. This process ends now", r"\1: \2"),
    (r"(The following tasks are unhealthy[^\n]*)\n(\d+(?:\n\d+)*)", r"jax: \1 \2"),
    (r"(Failed to send RPC to coordination service)", r"jax: \1"),
    (r"Terminating process because .*?absl::Status: ([^\n]*)", r"jax: \1"),
    (r"Terminating process because ([^\n]*)", r"jax: \1"),
    (r"\n(\w[\w.]*(?:Error|Exception): [^\n]*)\n*$", r"\1"),
)


def report(process: Process) -> str:
    """How a process ended, and why, in its own words; `silent` where it gave no reason."""
    for pattern, template in _REASONS:
        found = re.search(pattern, process.errors, re.DOTALL)
        if found:
            why = " ".join(found.expand(template).split())
            return f"status {process.status}, {why[:200]}"
    return f"status {process.status}, silent"


def explained(process: Process) -> bool:
    """Whether it ended with an error, and said why."""
    return process.status not in (None, 0) and not report(process).endswith("silent")


def resume(folder: Path, step: int, expected: list[dict[int, str]]) -> None:
    """A run from a checkpoint with as many workers has the same bits at every step."""
    with workers(folder, resume=step) as group:
        finished(group)
        first = [p.find("started")["hash"] for p in group]
        found = hashes(group)
    assert first == [was[step] for was in expected]
    assert found == [{s: was[s] for s in range(step + 1, STEPS + 1)} for was in expected]


def resume_with_fewer(folder: Path, step: int) -> None:
    """A run from a checkpoint with one worker less keeps the sum of the residuals."""
    with workers(folder, processes=WORKERS - 1, resume=step) as group:
        finished(group)
        moved = [p.find("resharded") for p in group]
        losses = [e["loss"] for p in group for e in p.events if e["event"] == "end"]
    for found in moved:
        # Two float32 hold 48 bits of a sum.
        assert found["difference"] <= 2**-40 * found["largest"] > 0
    assert len(losses) == (WORKERS - 1) * (STEPS - step)
    assert max(losses) < 10
