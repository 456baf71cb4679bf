"""Groups of processes that report in JSON lines; they end with the block that started them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Variables that would make our process a part of a group that someone else has started.
_FOREIGN = ("SLURM_", "OMPI_", "PMI_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS_ID")
_PR_SET_PDEATHSIG = 1


class Process:
    """A process, its ``pid``, and the ``time.monotonic()`` of its end.

    ``events`` holds the events that it has reported so far on standard output.
    """

    def __init__(self, command: Sequence[str], changed: threading.Condition, **options: Any):
        # Pipes for all: a file would be subject to the limits that a fault sets.
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        text = {"text": True, "encoding": "utf-8", "errors": "replace"}
        # In its own session: Ctrl-C ends this program, which then ends the process.
        self._popen = subprocess.Popen(command, **pipes, **text, start_new_session=True, **options)
        self.pid = self._popen.pid
        self.ended_at: float | None = None
        # Shared by the group, so that one can wait for any of them.
        self._changed = changed
        self.events: list[dict[str, Any]] = []
        # Lines, and whether each came on standard error.
        self._said: list[tuple[str, bool]] = []
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_events, self._read_errors, self._await_end)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def status(self) -> int | None:
        """The exit status, or minus the signal; None while it runs."""
        return self._popen.poll() if self.ended_at is not None else None

    @property
    def errors(self) -> str:
        """Everything that it has written to standard error."""
        return "".join(line for line, wrong in list(self._said) if wrong)

    @property
    def output(self) -> str:
        """Everything that it has written to both, in the order of arrival."""
        return "".join(line for line, _ in list(self._said))

    def find(self, event: str, **values: Any) -> dict[str, Any] | None:
        """The first event with this name and these values, or None."""
        wanted = {"event": event, **values}
        return next((e for e in self.events if wanted.items() <= e.items()), None)

    def wait_for(self, event: str, *, seconds: float, **values: Any) -> dict[str, Any]:
        """The event, as soon as it comes; a RuntimeError if it does not."""
        wait([self], lambda: self.find(event, **values) or self.ended_at is not None, seconds)
        found = self.find(event, **values)
        if found is None:
            raise RuntimeError(
                f"process {self.pid} (status {self.status}) did not say {event} {values} within "
                f"{seconds:g} s. Its last words:\n{self.errors[-3000:]}"
            )
        return found

    def wait_for_end(self, seconds: float) -> bool:
        """Whether it has ended, after that time at most."""
        return wait([self], lambda: self.ended_at is not None, seconds)

    def send(self, line: str) -> None:
        """Writes a line to its standard input; does nothing if it has ended."""
        with contextlib.suppress(OSError):
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends it a signal; does nothing if it has ended."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def close(self) -> None:
        """Kills it if it still runs; SIGKILL also ends a stopped process."""
        if self._popen.poll() is None:
            self._popen.kill()
        for thread in self._threads:
            thread.join()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            with contextlib.suppress(OSError):
                pipe.close()

    def _read_events(self) -> None:
        for line in self._popen.stdout:
            self._said.append((line, False))
            # Gloo writes a line of its own to standard output.
            with contextlib.suppress(ValueError), self._changed:
                event = json.loads(line)
                if isinstance(event, dict):
                    self.events.append(event)
                    self._changed.notify_all()

    def _read_errors(self) -> None:
        for line in self._popen.stderr:
            self._said.append((line, True))

    def _await_end(self) -> None:
        self._popen.wait()
        ended_at = time.monotonic()
        for thread in self._threads[:2]:
            thread.join()
        with self._changed:
            self.ended_at = ended_at
            self._changed.notify_all()


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], more: Mapping[str, str] | None = None, folder: Path = ROOT
) -> Iterator[list[Process]]:
    """A process for each command, with more variables; they are killed when the block ends."""
    processes: list[Process] = []
    changed = threading.Condition()
    variables = {**environment(), **(more or {})}
    try:
        for command in commands:
            processes.append(Process(command, changed, env=variables, cwd=folder))
        yield processes
    finally:
        for process in processes:
            process.close()


def wait(group: Sequence[Process], condition: Callable[[], Any], seconds: float) -> bool:
    """Whether a condition on the events and ends of a group holds within that time."""
    with group[0]._changed:
        return bool(group[0]._changed.wait_for(condition, seconds))


def wait_for_ends(group: Sequence[Process], seconds: float) -> None:
    """Returns when all have ended, or when one has failed and the others would wait for it."""
    wait(group, lambda: any(p.status for p in group) or all(p.status == 0 for p in group), seconds)


def in_new_process(function: Callable[..., Any], *given: Any) -> Any:
    """The result of a module's function in a new Python process that shares no state."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *given).result()


def environment() -> dict[str, str]:
    """The variables of this process, with this source tree, for a process alone on its CPUs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    paths = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}


@contextlib.contextmanager
def coordinator() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a coordinator on the loopback interface, and variables that bind it there.

    No other program gets the port while this is open. The coordinator of jax can share it, because
    it also binds with SO_REUSEPORT.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        yield address, {"JAX_COORDINATOR_BIND_ADDRESS": address}


class Interrupted(KeyboardInterrupt):
    """This process was interrupted, by Ctrl-C or by a plain ``kill``."""


def interrupt_when_told() -> None:
    """Makes a plain ``kill`` of this process raise an exception as Ctrl-C does, so it cleans up."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)


def _interrupt(*_) -> None:
    # A second one must not interrupt the cleanup.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise Interrupted


def die_with_parent() -> None:
    """Ends this process when its parent ends, for whatever reason; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
