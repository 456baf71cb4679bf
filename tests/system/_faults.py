"""The faults: actions on the workers of a training, and their required outcome."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks._common import namespaces
from benchmarks._common.processes import Process
from tests import groups
from tests.system import _task

WORKERS, STEPS, SAVE_EVERY = 3, 12, 3
# The fault comes in this step, and the last checkpoint before it is at step 6.
FAULT_STEP = 8
HEARTBEAT, DEADLINE, FIRST_DEADLINE = 20, 30, 500
# For a start, and for undisturbed steps, on a machine that also does other things.
PATIENCE = 600
# The worker that the fault hits, and one that keeps the others in the middle of a step.
VICTIM, HOLDER = 1, 2
# Seconds beyond the deadline or timeout that ends a process, for a machine that is busy.
SLACK = 15
# Seconds for which a worker is stopped.
STOP = float(os.environ.get("FAULTS_STOP", "30"))
# For each process, the hash after each step.
Hashes = list[dict[int, str]]


def workers(folder: Path, processes: int = WORKERS, **options: Any) -> Any:
    """The processes of one training, with checkpoints in the folder, for the length of the block.

    The options are those that `groups.group` takes, and settings that replace the defaults of
    `_task`.
    """
    usual = {"folder": str(folder), "steps": STEPS, "save_every": SAVE_EVERY, "resume": 0}
    usual |= {"heartbeat": HEARTBEAT, "deadline": DEADLINE, "first_deadline": FIRST_DEADLINE}
    usual |= {"hold_at": -1, "limit_at": -1}
    # Programs are compiled once, and quickly.
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder.parent / "compiled"))
    variables = {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": kept,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    options = {**usual, "variables": variables, **options}
    return groups.group("tests.system._task", processes, **options)


def finished(group: list[Process]) -> None:
    """Waits until all have finished; raises RuntimeError if one ends in another way."""
    for process in group:
        process.wait_for("finished", seconds=PATIENCE)
        if not process.wait_for_end(PATIENCE) or process.status != 0:
            raise RuntimeError(f"a worker finished, and then: {report(process)}")


def hashes(group: list[Process]) -> Hashes:
    """For each process, the hash of parameters and its part of the state after each step."""
    return [{e["step"] + 1: e["hash"] for e in p.events if e["event"] == "end"} for p in group]


def reference(folder: Path) -> Hashes:
    """The hashes of a training that nothing disturbs."""
    with workers(folder) as group:
        finished(group)
        return hashes(group)


def ended(group: list[Process], since: float, bound: float) -> float | None:
    """Seconds after ``since`` at which the last of them ended; None if over the bound."""
    if not all(p.wait_for_end(max(since + bound - time.monotonic(), 0)) for p in group):
        return None
    return max(p.ended_at - since for p in group)


_REASONS = (
    r"(?<=deadline: ).* did not end within .*?(?= on process)",
    r"(?<=deadline: ).*? failed on process.*?(?=\. This process ends now)",
    r"The following tasks are unhealthy[^\n]*\n\d+(?:\n\d+)*",
    r"Failed to send RPC to coordination service",
    r"Terminating process because [^\n]*",
    r"\n\w[\w.]*(?:Error|Exception): [^\n]*\n*$",
)


def report(process: Process) -> str:
    """How a process ended, and the reason that it gave, or `silent`."""
    found = (re.search(pattern, process.errors, re.DOTALL) for pattern in _REASONS)
    reasons = (" ".join(each[0].split())[:200] for each in found if each)
    return f"status {process.status}, {next(reasons, 'silent')}"


def explained(process: Process) -> bool:
    """Whether it ended with an error, and said why."""
    return process.status not in (None, 0) and not report(process).endswith("silent")


def killed(folder: Path, expected: Hashes) -> None:
    """A worker is killed in the middle of a step."""
    _struck(folder, expected, lambda group: group[VICTIM].signal(signal.SIGKILL), VICTIM)


def coordinator_killed(folder: Path, expected: Hashes) -> None:
    """Process 0, with the coordination service, is killed in the middle of a step."""
    _struck(folder, expected, lambda group: group[0].signal(signal.SIGKILL), 0, fewer=False)


def link_down(folder: Path, expected: Hashes) -> None:
    """The network link of a worker goes down: no connection is closed. Needs root."""
    bound = max(HEARTBEAT, DEADLINE) + SLACK
    with namespaces.network(WORKERS) as net:
        _struck(folder, expected, lambda _: net.link_down(VICTIM), bound=bound, network=net)


def _struck(folder, expected, strike, *but, bound=SLACK, fewer=True, **settings) -> None:
    """A fault in the middle of a step ends all processes, except ``but``."""
    with _in_a_step(folder, **settings) as (group, since):
        strike(group)
        group[HOLDER].send("go on")
        _end(group, since, bound, but=but)
    _goes_on(folder, expected, fewer=fewer)


def stopped(folder: Path, expected: Hashes) -> None:
    """A worker is stopped, and continues after the deadline of a step."""
    deadline = min(10.0, STOP / 3)
    with _in_a_step(folder, deadline=deadline, heartbeat=100) as (group, since):
        group[VICTIM].signal(signal.SIGSTOP)
        group[HOLDER].send("go on")
        _end(group, since, deadline + SLACK, but=[VICTIM])
        # The process is stopped, so only the clock shows that the time has come.
        group[VICTIM].wait_for_end(max(0.0, since + STOP - time.monotonic()))
        group[VICTIM].signal(signal.SIGCONT)
        assert ended([group[VICTIM]], time.monotonic(), SLACK) is not None
    _goes_on(folder, expected)


def stopped_with_patience(folder: Path, expected: Hashes) -> None:
    """A worker is stopped for less than every deadline: the training goes on."""
    patience = STOP * 4 + SLACK
    with _in_a_step(folder, deadline=patience, heartbeat=int(patience)) as (group, since):
        group[VICTIM].signal(signal.SIGSTOP)
        group[HOLDER].send("go on")
        group[VICTIM].wait_for_end(STOP)
        group[VICTIM].signal(signal.SIGCONT)
        finished(group)
        assert max(p.ended_at - since for p in group) <= STOP + PATIENCE
        assert hashes(group) == expected


def hangs(folder: Path, expected: Hashes) -> None:
    """A worker does not come to the step, but its heartbeats go on (a data loader that hangs)."""
    with _in_a_step(folder, deadline=10, heartbeat=100) as (group, since):
        _end(group, since, 10 + SLACK, but=[HOLDER])
    _goes_on(folder, expected)


def cannot_write(folder: Path, expected: Hashes) -> None:
    """One worker can't write its part of a checkpoint (a limit on the size of files)."""
    with workers(folder, changes={VICTIM: {"limit_at": FAULT_STEP}}) as group:
        _end_in_the_checkpoint(group)
    _goes_on(folder, expected)


def disk_full(folder: Path, expected: Hashes) -> None:
    """The disk of the checkpoints is full. Needs root."""
    disk = folder / "disk"
    filler, checkpoints = disk / "filler", disk / "checkpoints"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    try:
        with _in_a_step(checkpoints) as (group, _):
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            group[HOLDER].send("go on")
            _end_in_the_checkpoint(group)
        filler.unlink()
        _goes_on(checkpoints, expected)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def cut_in_half(folder: Path, expected: Hashes) -> None:
    """The largest file of the newest checkpoint is cut in half."""
    _damaged(folder, expected, lambda content: content[: len(content) // 2])


def flipped_bit(folder: Path, expected: Hashes) -> None:
    """One bit in the middle of the largest file of the newest checkpoint is flipped."""

    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 4
        return bytes(changed)

    _damaged(folder, expected, flip)


@contextlib.contextmanager
def _in_a_step(folder: Path, **settings: Any) -> Iterator[tuple[list[Process], float]]:
    """The group in the middle of a step, in which the holder keeps it; and the time."""
    with workers(folder, changes={HOLDER: {"hold_at": FAULT_STEP}}, **settings) as group:
        for process in group:
            process.wait_for("begin", step=FAULT_STEP, seconds=PATIENCE)
        yield group, time.monotonic()


def _end_in_the_checkpoint(group: list[Process]) -> None:
    for process in group:
        process.wait_for("saving", step=FAULT_STEP + 1, seconds=PATIENCE)
    _end(group, time.monotonic(), HEARTBEAT + SLACK)


def _damaged(folder: Path, expected: Hashes, damage: Callable[[bytes], bytes]) -> None:
    """A checkpoint is damaged between two runs; the run that restores it must notice."""
    step = FAULT_STEP + 1
    with workers(folder, steps=step) as group:
        finished(group)
    files = [path for path in (folder / str(step)).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(damage(largest.read_bytes()))
    with workers(folder, resume=step) as group:
        # The start of the processes takes time too, so the first that ends is the clock.
        assert group[0].wait_for_end(PATIENCE)
        since = min(p.ended_at for p in group if p.ended_at is not None)
        _end(group, since, HEARTBEAT + SLACK)
    assert list(_task.last_whole(folder)[1]) == [step]
    _goes_on(folder, expected, fewer=True)


def _end(group: list[Process], since: float, bound: float, *, but: Collection[int] = ()) -> None:
    """All processes, except ``but``, end within the bound and say why."""
    left = {i: process for i, process in enumerate(group) if i not in but}
    seconds = ended(list(left.values()), since, bound)
    print(f"\nended after {seconds} s (bound {bound:g} s)")
    for index, process in left.items():
        print(f"  process {index}: {report(process)}")
    assert seconds is not None
    assert all(explained(process) for process in left.values())


def _goes_on(folder: Path, expected: Hashes, *, fewer: bool = False) -> None:
    """Continues from the last checkpoint: the same bits, or the same sum with one worker less."""
    step, _ = _task.last_whole(folder)
    assert step == FAULT_STEP + 1 - SAVE_EVERY
    kept = folder.with_name(f"{folder.name} kept")
    shutil.copytree(folder, kept)
    with workers(folder, resume=step) as group:
        finished(group)
        first, found = [p.find("started")["hash"] for p in group], hashes(group)
    assert first == [was[step] for was in expected]
    assert found == [{s: was[s] for s in range(step + 1, STEPS + 1)} for was in expected]
    print(f"  resumed from step {step} with the same bits")
    if not fewer:
        return
    with workers(kept, processes=WORKERS - 1, resume=step) as group:
        finished(group)
        moved = [p.find("resharded") for p in group]
        losses = [e["loss"] for p in group for e in p.events if e["event"] == "end"]
    for found in moved:
        # Two float32 hold 48 bits of a sum.
        assert found["difference"] <= 2**-40 * found["largest"] > 0
    assert len(losses) == (WORKERS - 1) * (STEPS - step)
    assert max(losses) < 10
    print("  and with one worker less, with the sum of the residuals")
