"""Starts one worker process on each host, and sends the same commands to all of them."""

import argparse
import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._common import options, reports, timing
from .._common.namespaces import Hosts, NetworkError
from .._common.processes import Process, started, wait

# With these, glibc keeps large buffers instead of returning them, so that a step does not pay for
# fresh pages. They are the same for all contestants. There is one arena, since the arenas of
# threads have no room for buffers of over 64 MB and map each of them again.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
    # Pages of 2 MB, if the system gives them on request.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
Answer = dict[str, Any]
# A new port for every start: a closed one may be in use for a while.
_ports = itertools.count(9000)


class WorkerError(NetworkError):
    """A worker failed, ended or did not answer; the message is one line."""


class Workers:
    """The processes of one role, one on each host; a late answer is an error."""

    def __init__(self, processes: Sequence[Process], seconds: float):
        self._processes = processes
        self._seconds = seconds
        self._asked = 0

    def ask(self, do: str, **arguments: Any) -> list[Answer]:
        """The answers of all workers to a command; a WorkerError if one of them failed."""
        for process in self._processes:
            process.send(json.dumps({"do": do, **arguments}))
        return self.answers(do)

    def answers(self, what: str) -> list[Answer]:
        """The next answer of each worker, waited for."""
        self._asked += 1
        hosts = list(enumerate(self._processes))

        def late() -> list[int]:
            return [host for host, process in hosts if len(process.events) < self._asked]

        def failed() -> Iterator[str]:
            for host, process in hosts:
                if host not in late() and "failure" in process.events[-1]:
                    yield f"host {host}, {what}: {process.events[-1]['failure']}"
                elif host in late() and process.ended_at is not None:
                    said = process.errors.strip().splitlines() or ["it said nothing"]
                    yield f"host {host} ended during {what}: {said[-1]}"

        wait(self._processes, lambda: not late() or any(failed()), self._seconds)
        for complaint in failed():
            raise WorkerError(complaint)
        if late():
            raise WorkerError(f"{what}: no answer from hosts {late()} in {self._seconds:g} s")
        return [process.events[-1] for process in self._processes]


@contextlib.contextmanager
def groups(
    hosts: Hosts, config: dict[str, Any], *, pin: bool = True, seconds: float
) -> Iterator[Callable[[str], Workers]]:
    """Yields a function that gives the processes of a role, and starts them on the first call.

    A role is made from ``config``, its host and the address of the coordinator. With ``pin`` each
    process stays on one core. An answer that takes more than ``seconds`` is an error.
    """
    more = _MALLOC | {"GLOO_SOCKET_IFNAME": "eth0"} | ({"OMP_NUM_THREADS": "1"} if pin else {})
    with contextlib.ExitStack() as stack:

        @functools.cache
        def group(role: str) -> Workers:
            options.say(f"starting the processes of {role}")
            coordinator = f"{hosts.addresses[0]}:{next(_ports)}"
            given = {"workers": len(hosts.addresses), "coordinator": coordinator, "pin": pin}
            program = [sys.executable, "-m", "benchmarks._common.worker", role]
            commands = [
                [*hosts.command(host), *program, json.dumps(config | given | {"host": host})]
                for host in range(len(hosts.addresses))
            ]
            made = Workers(stack.enter_context(started(commands, more)), seconds)
            made.answers("start")
            return made

        yield group


def in_turns(
    ask: Callable[[str], list[Answer]], names: Sequence[str], rounds: int, what: str
) -> dict[str, list[list[Answer]]]:
    """The answers of ``ask(name)``, by name and round."""
    found: dict[str, list[list[Answer]]] = {name: [] for name in names}
    for turn, name in timing.turns(names, rounds):
        options.say(f"{what}: round {turn + 1} of {rounds}, {name}")
        found[name].append(ask(name))
    return found


def all_of(args: argparse.Namespace, cases: Iterable[str], measured: Any, show: Any) -> None:
    """Measures cases; shows their rows as they come, and writes them to the file."""
    options.require_network()
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    rows: list[dict[str, Any]] = []
    for case in cases:
        for found in measured(args, case):
            rows += found
            show(args, found)
            # After each, so that a failure in the next one loses nothing.
            reports.write(args.json, {"settings": settings, "rows": rows})


def slowest(answers: Sequence[Answer], key: str = "seconds") -> float:
    """A round is as slow as its slowest worker."""
    return max(answer[key] for answer in answers)


def mean(answers: Sequence[Answer], key: str = "received") -> float:
    """The mean of the workers' counts."""
    return sum(answer[key] for answer in answers) / len(answers)


def counted(rounds: Sequence[Sequence[Answer]], *keys: str) -> dict[str, list[float]]:
    """For each round the slowest worker's time, and the mean of the counts under these keys."""
    row = {"seconds": [slowest(answers) for answers in rounds]}
    return row | {key: [mean(answers, key) for answers in rounds] for key in keys}
