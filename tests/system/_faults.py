"""The faults: what is done to the workers, and what must come of it."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common import namespaces
from benchmarks._common.processes import Process
from tests.system import _task
from tests.system import _training as training

# The one that things happen to, and one that keeps the others in the middle of a step.
VICTIM, HOLDER = 1, 2
# Seconds beyond the deadline or timeout that ends a process, for a machine that is busy.
SLACK = 15


class Outcome(NamedTuple):
    """What came of a fault.

    Attributes:
      reports: what each process said that was left to say something, by its index.
      seconds: from the fault until all of them had ended; None where the bound was missed.
      bound: seconds in which they had to end.
      step: of the checkpoint from which training went on; -1 where it never stopped.
      check: what was found of the result.
      ok: whether all is as it must be.
    """

    reports: dict[int, str]
    seconds: float | None
    bound: float
    step: int
    check: str
    ok: bool


class Setup(NamedTuple):
    """What all rows share.

    Attributes:
      folder: an empty one for this row.
      expected: the hashes of a training that nothing disturbs.
      stop: seconds for which a worker is stopped.
    """

    folder: Path
    expected: list[dict[int, str]]
    stop: float


def table(name: str, fault: Callable[[Setup], Outcome], outcome: Outcome) -> str:
    """What came of a fault, as lines of text."""
    summary = (fault.__doc__ or "").splitlines()[0]
    seconds = "NOT ended" if outcome.seconds is None else f"ended after {outcome.seconds:.1f} s"
    origin = "never stopped" if outcome.step < 0 else f"resumed from step {outcome.step}"
    lines = [
        f"{name}: {summary} {'ok' if outcome.ok else 'FAIL'}",
        f"  {seconds} (bound {outcome.bound:g} s); {origin}; {outcome.check}",
    ]
    lines += [f"  process {index}: {text}" for index, text in sorted(outcome.reports.items())]
    return "\n".join(lines)


def killed(setup: Setup) -> Outcome:
    """A worker is killed in the middle of a step."""

    def kill(group: list[Process]) -> None:
        group[VICTIM].signal(signal.SIGKILL)

    return _in_a_step(setup, kill, {VICTIM}, SLACK, fewer=True)


def coordinator_killed(setup: Setup) -> Outcome:
    """Process 0, with the coordination service, is killed in the middle of a step."""
    return _in_a_step(setup, lambda group: group[0].signal(signal.SIGKILL), {0}, SLACK)


def stopped(setup: Setup) -> Outcome:
    """A worker is stopped, and goes on later than the deadline of a step."""
    deadline = min(10.0, setup.stop / 3)

    def stop(group: list[Process]) -> None:
        group[VICTIM].signal(signal.SIGSTOP)

    def go_on(group: list[Process], since: float) -> str:
        # Nothing can tell that it is time but the clock: the process is stopped.
        group[VICTIM].wait_for_end(max(0.0, since + setup.stop - time.monotonic()))
        group[VICTIM].signal(signal.SIGCONT)
        seconds = training.ended([group[VICTIM]], time.monotonic(), SLACK)
        return "" if seconds is not None else f"; stopped worker RUNS ON: {VICTIM}"

    return _in_a_step(
        setup, stop, {VICTIM}, deadline + SLACK, after=go_on, deadline=deadline, heartbeat=100
    )


def stopped_with_patience(setup: Setup) -> Outcome:
    """A worker is stopped for less than every deadline: the training goes on."""
    patience = setup.stop * 4 + SLACK
    settings = {"deadline": patience, "heartbeat": int(patience)}
    with training.workers(setup.folder, changes=_hold(), **settings) as group:
        _reach_the_step(group)
        group[VICTIM].signal(signal.SIGSTOP)
        since = time.monotonic()
        group[HOLDER].send("go on")
        group[VICTIM].wait_for_end(setup.stop)
        group[VICTIM].signal(signal.SIGCONT)
        training.finished(group)
        seconds = max(p.ended_at - since for p in group)
        same = training.hashes(group) == setup.expected
    check = f"3 workers: {'same bits' if same else 'OTHER BITS'}"
    bound = setup.stop + training.PATIENCE
    return Outcome({}, seconds, bound, -1, check, same and seconds <= bound)


def hangs(setup: Setup) -> Outcome:
    """A worker does not come to the step, but its heartbeats go on (a data loader that hangs)."""
    deadline = 10

    def nothing(group: list[Process]) -> None:
        del group

    return _in_a_step(
        setup, nothing, {HOLDER}, deadline + SLACK, release=False, deadline=deadline, heartbeat=100
    )


def link_down(setup: Setup) -> Outcome:
    """The network link of a worker goes down: no connection is closed. Needs root."""
    with namespaces.network(training.WORKERS) as network:
        return _in_a_step(
            setup,
            lambda group: network.link_down(VICTIM),
            set(),
            max(training.HEARTBEAT, training.DEADLINE) + SLACK,
            network=network,
            fewer=True,
        )


def cannot_write(setup: Setup) -> Outcome:
    """One worker can't write its part of a checkpoint (a limit on the size of files)."""
    return _in_a_checkpoint(setup, {VICTIM: {"limit_at": training.FAULT_STEP}}, None)


def disk_full(setup: Setup) -> Outcome:
    """The disk of the checkpoints is full. Needs root."""
    folder = setup.folder / "disk"
    filler = folder / "filler"

    def fill(group: list[Process]) -> None:
        del group
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with _small_disk(folder, megabytes=8):
        case = setup._replace(folder=folder / "checkpoints")
        return _in_a_checkpoint(case, _hold(), fill, before_resuming=filler.unlink)


def cut_in_half(setup: Setup) -> Outcome:
    """The largest file of the newest checkpoint is cut in half."""
    return _damaged(setup, lambda path: os.truncate(path, path.stat().st_size // 2))


def flipped_bit(setup: Setup) -> Outcome:
    """One bit of the largest file of the newest checkpoint is another."""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)

    return _damaged(setup, flip)


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


def _hold() -> dict[int, dict[str, Any]]:
    return {HOLDER: {"hold_at": training.FAULT_STEP}}


def _reach_the_step(group: list[Process]) -> None:
    """All but the holder are in the step, and can't leave it before the holder joins."""
    for process in group:
        process.wait_for("begin", step=training.FAULT_STEP, seconds=training.PATIENCE)


def _in_a_step(
    setup: Setup,
    fault: Callable[[list[Process]], None],
    victims: set[int],
    bound: float,
    *,
    release: bool = True,
    fewer: bool = False,
    after: Callable[[list[Process], float], str] | None = None,
    **settings: Any,
) -> Outcome:
    """A fault in the middle of a step; all but the victims must end, and say why."""
    with training.workers(setup.folder, changes=_hold(), **settings) as group:
        _reach_the_step(group)
        since = time.monotonic()
        fault(group)
        if release:
            group[HOLDER].send("go on")
        return _verdict(setup, group, victims, since, bound, after=after, fewer=fewer)


def _in_a_checkpoint(
    setup: Setup,
    changes: dict[int, dict[str, Any]],
    fault: Callable[[list[Process]], None] | None,
    before_resuming: Callable[[], None] | None = None,
) -> Outcome:
    """A fault in the checkpoint after the step; all must end, and say why."""
    bound = training.HEARTBEAT + SLACK
    with training.workers(setup.folder, changes=changes) as group:
        if fault is not None:
            _reach_the_step(group)
            fault(group)
            group[HOLDER].send("go on")
        for process in group:
            process.wait_for("saving", step=training.FAULT_STEP + 1, seconds=training.PATIENCE)
        since = time.monotonic()
        return _verdict(setup, group, set(), since, bound, before_resuming=before_resuming)


def _damaged(setup: Setup, damage: Callable[[Path], None]) -> Outcome:
    """A checkpoint is damaged when nobody looks; who restores it must notice."""
    step = training.FAULT_STEP + 1
    with training.workers(setup.folder, steps=step) as group:
        training.finished(group)
    files = [path for path in (setup.folder / str(step)).rglob("*") if path.is_file()]
    damage(max(files, key=lambda path: path.stat().st_size))
    bound = training.HEARTBEAT + SLACK
    with training.workers(setup.folder, resume=step) as group:
        # The start of the processes takes time too, so the first that ends is the clock.
        if not any(p.wait_for_end(training.PATIENCE) for p in group[:1]):
            return Outcome({}, None, bound, -1, "no process ended", False)
        since = min(p.ended_at for p in group if p.ended_at is not None)
        return _verdict(setup, group, set(), since, bound, fewer=True)


def _verdict(
    setup: Setup,
    group: list[Process],
    victims: set[int],
    since: float,
    bound: float,
    *,
    after: Callable[[list[Process], float], str] | None = None,
    before_resuming: Callable[[], None] | None = None,
    fewer: bool = False,
) -> Outcome:
    """Whether all end in time and say why, and whether training goes on where it was."""
    survivors = {i: process for i, process in enumerate(group) if i not in victims}
    seconds = training.ended(list(survivors.values()), since, bound)
    reports = {i: training.report(process) for i, process in survivors.items()}
    ok = seconds is not None and all(training.explained(p) for p in survivors.values())
    complaint = after(group, since) if after is not None else ""
    for process in group:
        process.close()
    if before_resuming is not None:
        before_resuming()
    step, _ = _task.last_whole(setup.folder)
    kept = setup.folder.with_name(f"{setup.folder.name} kept")
    shutil.copytree(setup.folder, kept)
    results = [training.resumed(setup.folder, step, setup.expected)]
    if fewer:
        results.append(training.resumed_by_fewer(kept, step))
    check = "; ".join(said for _, said in results) + complaint
    ok = ok and all(fine for fine, _ in results) and not complaint
    ok = ok and step == training.FAULT_STEP + 1 - training.SAVE_EVERY
    return Outcome(reports, seconds, bound, step, check, ok)
