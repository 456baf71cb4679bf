"""Processes that report in JSON lines; they end with the block that started them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Process:
    """A process, and what it has said so far.

    Attributes:
      pid: its id.
      ended_at: ``time.monotonic()`` when it ended; None before.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        # Pipes for all: a file would be subject to the limits that a fault sets.
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            # Ctrl-C ends this program, which then ends them.
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.ended_at: float | None = None
        self._changed = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._errors: list[str] = []
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
    def events(self) -> list[dict[str, Any]]:
        """All it has said on standard output."""
        with self._changed:
            return list(self._events)

    @property
    def errors(self) -> str:
        """All it has said on standard error."""
        with self._changed:
            return "".join(self._errors)

    def find(self, event: str, **values: Any) -> dict[str, Any] | None:
        """The first event of this name and these values, or None."""
        wanted = {"event": event, **values}
        return next((e for e in self.events if wanted.items() <= e.items()), None)

    def wait_for(self, event: str, *, seconds: float, **values: Any) -> dict[str, Any]:
        """The event, as soon as it comes.

        Raises:
          RuntimeError: the process ended, or the time is over, without it.
        """
        self._wait(lambda: self.find(event, **values) or self.ended_at is not None, seconds)
        found = self.find(event, **values)
        if found is None:
            raise RuntimeError(
                f"process {self.pid} (status {self.status}) did not say {event} {values} within "
                f"{seconds:g} s. Its last words:\n{self.errors[-3000:]}"
            )
        return found

    def wait_for_end(self, seconds: float) -> bool:
        """Whether it has ended, after that time at most."""
        return bool(self._wait(lambda: self.ended_at is not None, seconds))

    def send(self, line: str) -> None:
        """A line for its standard input; nothing where it has ended."""
        with contextlib.suppress(OSError):
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()

    def signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def close(self) -> None:
        """Kills it where it still runs; SIGKILL ends a stopped process too."""
        if self._popen.poll() is None:
            self._popen.kill()
        for thread in self._threads:
            thread.join()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            with contextlib.suppress(OSError):
                pipe.close()

    def _wait(self, condition: Callable[[], Any], seconds: float) -> Any:
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def _read_events(self) -> None:
        for line in self._popen.stdout:
            # Gloo writes a line of its own to standard output.
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    with self._changed:
                        self._events.append(event)
                        self._changed.notify_all()

    def _read_errors(self) -> None:
        for line in self._popen.stderr:
            with self._changed:
                self._errors.append(line)

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
    commands: Sequence[Sequence[str]], environment: dict[str, str] | None = None
) -> Iterator[list[Process]]:
    """The processes of the commands, for the length of the block."""
    processes: list[Process] = []
    try:
        for command in commands:
            processes.append(Process(command, {**os.environ, **(environment or {})}))
        yield processes
    finally:
        for process in processes:
            process.close()


def end_with_blocks() -> None:
    """SIGTERM to this program leaves its blocks, which end processes and clean up, like Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    """A port of the loopback interface that nobody listened to a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
