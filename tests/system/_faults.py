"""The faults: what is done to the workers, and what must come of it."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks._common import namespaces
from benchmarks._common.processes import Process
from tests.system import _task
from tests.system import _training as training

# The one that things happen to, and one that keeps the others in the middle of a step.
VICTIM, HOLDER = 1, 2
# Seconds beyond the deadline or timeout that ends a process, for a machine that is busy.
SLACK = 15
# Seconds for which a worker is stopped.
STOP = float(os.environ.get("FAULTS_STOP", "30"))
_HOLD = {HOLDER: {"hold_at": training.FAULT_STEP}}
# Of each process the hash after each step, of a training that nothing disturbs.
Hashes = list[dict[int, str]]


def killed(folder: Path, expected: Hashes) -> None:
    """A worker is killed in the middle of a step."""
    with _in_a_step(folder) as (group, since):
        group[VICTIM].signal(signal.SIGKILL)
        group[HOLDER].send("go on")
        _end(group, since, SLACK, but={VICTIM})
    _goes_on(folder, expected, fewer=True)


def coordinator_killed(folder: Path, expected: Hashes) -> None:
    """Process 0, with the coordination service, is killed in the middle of a step."""
    with _in_a_step(folder) as (group, since):
        group[0].signal(signal.SIGKILL)
        group[HOLDER].send("go on")
        _end(group, since, SLACK, but={0})
    _goes_on(folder, expected)


def stopped(folder: Path, expected: Hashes) -> None:
    """A worker is stopped, and goes on later than the deadline of a step."""
    deadline = min(10.0, STOP / 3)
    with _in_a_step(folder, deadline=deadline, heartbeat=100) as (group, since):
        group[VICTIM].signal(signal.SIGSTOP)
        group[HOLDER].send("go on")
        _end(group, since, deadline + SLACK, but={VICTIM})
        # Nothing can tell that it is time but the clock: the process is stopped.
        group[VICTIM].wait_for_end(max(0.0, since + STOP - time.monotonic()))
        group[VICTIM].signal(signal.SIGCONT)
        assert training.ended([group[VICTIM]], time.monotonic(), SLACK) is not None
    _goes_on(folder, expected)


def stopped_with_patience(folder: Path, expected: Hashes) -> None:
    """A worker is stopped for less than every deadline: the training goes on."""
    patience = STOP * 4 + SLACK
    with _in_a_step(folder, deadline=patience, heartbeat=int(patience)) as (group, since):
        group[VICTIM].signal(signal.SIGSTOP)
        group[HOLDER].send("go on")
        group[VICTIM].wait_for_end(STOP)
        group[VICTIM].signal(signal.SIGCONT)
        training.finished(group)
        assert max(p.ended_at - since for p in group) <= STOP + training.PATIENCE
        assert training.hashes(group) == expected


def hangs(folder: Path, expected: Hashes) -> None:
    """A worker does not come to the step, but its heartbeats go on (a data loader that hangs)."""
    deadline = 10
    with _in_a_step(folder, deadline=deadline, heartbeat=100) as (group, since):
        _end(group, since, deadline + SLACK, but={HOLDER})
    _goes_on(folder, expected)


def link_down(folder: Path, expected: Hashes) -> None:
    """The network link of a worker goes down: no connection is closed. Needs root."""
    with (
        namespaces.network(training.WORKERS) as network,
        _in_a_step(folder, network=network) as (group, since),
    ):
        network.link_down(VICTIM)
        group[HOLDER].send("go on")
        _end(group, since, max(training.HEARTBEAT, training.DEADLINE) + SLACK)
    _goes_on(folder, expected, fewer=True)


def cannot_write(folder: Path, expected: Hashes) -> None:
    """One worker can't write its part of a checkpoint (a limit on the size of files)."""
    with training.workers(folder, changes={VICTIM: {"limit_at": training.FAULT_STEP}}) as group:
        _end_in_the_checkpoint(group)
    _goes_on(folder, expected)


def disk_full(folder: Path, expected: Hashes) -> None:
    """The disk of the checkpoints is full. Needs root."""
    disk = folder / "disk"
    filler, checkpoints = disk / "filler", disk / "checkpoints"
    with _small_disk(disk, megabytes=8):
        with _in_a_step(checkpoints) as (group, _):
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            group[HOLDER].send("go on")
            _end_in_the_checkpoint(group)
        filler.unlink()
        _goes_on(checkpoints, expected)


def cut_in_half(folder: Path, expected: Hashes) -> None:
    """The largest file of the newest checkpoint is cut in half."""
    _damaged(folder, expected, lambda content: content[: len(content) // 2])


def flipped_bit(folder: Path, expected: Hashes) -> None:
    """One bit of the largest file of the newest checkpoint is another."""

    def flip(content: bytes) -> bytes:
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]

    _damaged(folder, expected, flip)


@contextlib.contextmanager
def _small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own at ``folder``, for the length of the block. Needs root."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextlib.contextmanager
def _in_a_step(folder: Path, **settings: Any) -> Iterator[tuple[list[Process], float]]:
    """The group in the middle of a step, which the holder keeps it in; and the time."""
    with training.workers(folder, changes=_HOLD, **settings) as group:
        for process in group:
            process.wait_for("begin", step=training.FAULT_STEP, seconds=training.PATIENCE)
        yield group, time.monotonic()


def _end_in_the_checkpoint(group: list[Process]) -> None:
    for process in group:
        process.wait_for("saving", step=training.FAULT_STEP + 1, seconds=training.PATIENCE)
    _end(group, time.monotonic(), training.HEARTBEAT + SLACK)


def _damaged(folder: Path, expected: Hashes, damage: Callable[[bytes], bytes]) -> None:
    """A checkpoint is damaged when nobody looks; who restores it must notice."""
    step = training.FAULT_STEP + 1
    with training.workers(folder, steps=step) as group:
        training.finished(group)
    files = [path for path in (folder / str(step)).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(damage(largest.read_bytes()))
    with training.workers(folder, resume=step) as group:
        # The start of the processes takes time too, so the first that ends is the clock.
        assert group[0].wait_for_end(training.PATIENCE)
        since = min(p.ended_at for p in group if p.ended_at is not None)
        _end(group, since, training.HEARTBEAT + SLACK)
    _goes_on(folder, expected, fewer=True)


def _end(
    group: list[Process], since: float, bound: float, *, but: Collection[int] = frozenset()
) -> None:
    """All but some end within the bound, and say why."""
    left = {i: process for i, process in enumerate(group) if i not in but}
    seconds = training.ended(list(left.values()), since, bound)
    print(f"\nended after {seconds} s (bound {bound:g} s)")
    for index, process in left.items():
        print(f"  process {index}: {training.report(process)}")
    assert seconds is not None
    assert all(training.explained(process) for process in left.values())


def _goes_on(folder: Path, expected: Hashes, *, fewer: bool = False) -> None:
    """From the last checkpoint before the fault, to the same bits; with one less, the same sum."""
    step, _ = _task.last_whole(folder)
    assert step == training.FAULT_STEP + 1 - training.SAVE_EVERY
    kept = folder.with_name(f"{folder.name} kept")
    shutil.copytree(folder, kept)
    training.resume(folder, step, expected)
    print(f"  resumed from step {step} with the same bits")
    if fewer:
        training.resume_with_fewer(kept, step)
        print("  and with one worker less, with the sum of the residuals")
