"""A job of processes that may be killed, stopped and started again, with its coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from .._common.namespaces import Hosts
from .._common.processes import ROOT, Process, coordinator, environment

# Seconds that a process of jax may take to start on a busy machine.
PATIENCE = float(os.environ.get("PATIENCE", "240"))


class Cluster:
    """The workers of a job by their number, and the events of all their lives.

    ``lives`` holds the processes of each number, the newest last.
    """

    def __init__(self, module: str, size: int, settings: Mapping[str, Any], hosts: Hosts | None):
        self._module = module
        self._settings = settings
        self._hosts = hosts
        self._changed = threading.Condition()
        self._environment = environment()
        self.size = size
        self.lives: list[list[Process]] = [[] for _ in range(size)]
        self.coordinator: Process | None = None
        self._stack = contextlib.ExitStack()
        if hosts:
            # In its own namespace every port is free.
            self._address = f"{hosts.addresses[size]}:20000"
        else:
            self._address, _ = self._stack.enter_context(coordinator())

    def begin(self) -> None:
        """Starts the coordinator and all workers."""
        self._coordinate()
        for number in range(self.size):
            self.start(number)

    def restart_coordinator(self) -> None:
        """Ends the job, and begins another one at the same address, without workers so far."""
        if self.coordinator is not None:
            self.coordinator.close()
        self._coordinate()

    def _coordinate(self) -> None:
        told = ["--address", self._address, "--processes", str(self.size)]
        told += ["--heartbeat-seconds", str(self._settings["heartbeat"])]
        self.coordinator = self._started(["-m", "optax_ext.elastic", *told], self.size)

    def start(self, number: int, **changes: Any) -> Process:
        """Starts a new life of a worker."""
        settings = {"address": self._address, "size": self.size, "number": number}
        settings |= {"began": time.time(), **self._settings, **changes}
        process = self._started(["-m", self._module, json.dumps(settings)], number)
        self.lives[number].append(process)
        return process

    def _started(self, arguments: Sequence[str], host: int) -> Process:
        command = [sys.executable, *arguments]
        if self._hosts:
            command = [*self._hosts.command(host), *command]
        return Process(command, self._changed, env=self._environment, cwd=ROOT)

    def kill(self, number: int) -> None:
        """Kills a worker with SIGKILL, as a machine that loses its power would."""
        self.lives[number][-1].signal(signal.SIGKILL)

    def signal(self, number: int, which: signal.Signals) -> None:
        """Sends a signal to a worker."""
        self.lives[number][-1].signal(which)

    @property
    def living(self) -> list[Process]:
        """The processes of workers that have not ended."""
        return [lives[-1] for lives in self.lives if lives and lives[-1].ended_at is None]

    def wait_for(self, what: str, condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
        """Waits until a condition on the events holds; a RuntimeError if that takes too long."""
        with self._changed:
            if self._changed.wait_for(condition, seconds):
                return
        tails = "\n".join(
            f"-- worker {number}, status {lives[-1].status}:\n{lives[-1].output[-6000:]}"
            for number, lives in enumerate(self.lives)
            if lives
        )
        raise RuntimeError(f"not within {seconds:g} s: {what}\n{tails}")

    def wait_for_step(self, step: int, numbers: Sequence[int] | None = None) -> None:
        """Waits until each of these workers, by default all that live, has taken so many steps."""
        awaited = range(self.size) if numbers is None else numbers

        def failed() -> bool:
            return any(self.lives[number][-1].status == 1 for number in awaited)

        def reached() -> bool:
            return failed() or all(self.step_of(number) >= step for number in awaited)

        what = f"step {step} of workers {list(awaited)}"
        self.wait_for(what, reached)
        if failed():
            self.wait_for(what, lambda: False, 0.0)

    def step_of(self, number: int) -> int:
        """The last step that this life of a worker has reported; -1 before its first."""
        events = self.lives[number][-1].events
        steps = (event["step"] for event in reversed(events) if event.get("event") == "step")
        return next(steps, -1)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of all lives of all workers, each with the ``number`` of its worker."""
        return [
            {"number": number, "life": life, **event}
            for number, lives in enumerate(self.lives)
            for life, process in enumerate(lives)
            for event in list(process.events)
            if event.get("event") == name
        ]

    def close(self) -> None:
        """Ends everything that was started here."""
        for process in [*(x for lives in self.lives for x in lives), self.coordinator]:
            if process is not None:
                process.close()
        self._stack.close()


@contextlib.contextmanager
def cluster(
    module: str, size: int, hosts: Hosts | None = None, **settings: Any
) -> Generator[Cluster]:
    """A job of ``python -m module JSON`` for the length of the block.

    The setting ``heartbeat`` also applies to the coordinator. A network needs one host more than
    there are workers, for the coordinator.
    """
    made = Cluster(module, size, settings, hosts)
    try:
        made.begin()
        yield made
    finally:
        made.close()
