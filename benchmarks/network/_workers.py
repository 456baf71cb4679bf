"""Starts one worker process on each host, and asks all of them the same thing."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .._common.namespaces import Hosts
from .._common.processes import Process, started, wait

# With these glibc keeps large buffers instead of giving them back, so that a step does
# not pay for fresh pages: the same for all contestants. One arena, since the others, those
# of threads, have no room for buffers of over 64 MB and map each anew.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
    # Pages of 2 MB where the system gives them to those who ask.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class WorkerError(Exception):
    """A worker failed, ended or did not answer; one line."""


class Workers:
    """The processes of one program, one on each host."""

    def __init__(self, processes: Sequence[Process], seconds: float):
        self._processes = processes
        self._seconds = seconds
        self._asked = 0

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of all workers to a command.

        Raises:
          WorkerError: one of them failed.
        """
        for process in self._processes:
            process.send(json.dumps({"do": do, **arguments}))
        return self.answers(do)

    def answers(self, what: str) -> list[dict[str, Any]]:
        """The next answer of each worker, waited for."""
        self._asked += 1

        def answered() -> list[bool]:
            return [len(process.events) >= self._asked for process in self._processes]

        def failed() -> list[str]:
            found = []
            for host, (process, has) in enumerate(zip(self._processes, answered(), strict=True)):
                last = process.events[-1] if has else {}
                if "failure" in last:
                    found.append(f"host {host}, {what}: {last['failure']}")
                elif not has and process.ended_at is not None:
                    said = process.errors.strip().splitlines() or ["it said nothing"]
                    found.append(f"host {host} ended during {what}: {said[-1]}")
            return found

        wait(self._processes, lambda: all(answered()) or failed(), self._seconds)
        if failed():
            raise WorkerError(failed()[0])
        late = [host for host, has in enumerate(answered()) if not has]
        if late:
            raise WorkerError(f"{what}: no answer from hosts {late} in {self._seconds:g} s")
        return [process.events[-1] for process in self._processes]


@contextlib.contextmanager
def workers(
    program: str, hosts: Hosts, config: dict[str, Any], *, threads: int, seconds: float
) -> Iterator[Workers]:
    """Runs a program on each host until the end of the `with`.

    Args:
      program: a module to run.
      hosts: the hosts.
      config: what the program gets as its first argument, with its host added.
      threads: for OpenMP; 0: as many as there are cores.
      seconds: after which a missing answer is an error.
    """
    more = _MALLOC | {"GLOO_SOCKET_IFNAME": "eth0"}
    if threads:
        more |= {"OMP_NUM_THREADS": str(threads)}
    module = [sys.executable, "-m", program]
    commands = [
        [*hosts.command(host), *module, json.dumps(config | {"host": host})]
        for host in range(len(hosts.addresses))
    ]
    with started(commands, more) as processes:
        group = Workers(processes, seconds)
        group.answers("start")
        yield group
