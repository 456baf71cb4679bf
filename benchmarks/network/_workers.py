"""Starts one worker process on each host, and asks all of them the same thing."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _hosts import Hosts

_HERE = Path(__file__).resolve().parent
# With these glibc keeps large buffers instead of giving them back, so that a step does
# not pay for fresh pages: the same for all contestants. One arena, since the others, those
# of threads, have no room for buffers of over 64 MB and map each anew.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**28),
}


class WorkerError(Exception):
    """A worker failed, ended or did not answer; one line."""


class Workers:
    """The processes of one program, one on each host."""

    def __init__(self, processes: list[subprocess.Popen], logs: list[Path], seconds: float):
        self._processes = processes
        self._logs = logs
        self._seconds = seconds

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of all workers to a command.

        Raises:
          WorkerError: one of them failed.
        """
        line = json.dumps({"do": do, **arguments}) + "\n"
        for host, process in enumerate(self._processes):
            try:
                process.stdin.write(line.encode())
                process.stdin.flush()
            except BrokenPipeError:
                raise WorkerError(self._why(host, "ended")) from None
        return self.answers(do)

    def answers(self, what: str) -> list[dict[str, Any]]:
        """One answer of each worker, waited for."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._seconds
        parts: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for host, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, host)
            while len(found) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(set(range(len(self._processes))) - set(found))
                    raise WorkerError(f"{what}: no answer from hosts {late} in {self._seconds:g} s")
                for key, _ in ready:
                    host = key.data
                    read = os.read(key.fd, 65536)
                    if not read:
                        raise WorkerError(self._why(host, f"ended during {what}"))
                    parts[host] = parts.get(host, b"") + read
                    if parts[host].endswith(b"\n"):
                        found[host] = json.loads(parts[host])
                        if "failure" in found[host]:
                            raise WorkerError(f"host {host}, {what}: {found[host]['failure']}")
        return [found[host] for host in range(len(self._processes))]

    def _why(self, host: int, what: str) -> str:
        lines = self._logs[host].read_text(errors="replace").strip().splitlines()
        return f"host {host} {what}: {lines[-1] if lines else 'it said nothing'}"


@contextlib.contextmanager
def workers(
    program: str, hosts: Hosts, config: dict[str, Any], *, threads: int, seconds: float
) -> Iterator[Workers]:
    """Runs a program of this folder on each host until the end of the `with`.

    Args:
      program: the name of a file here.
      hosts: the hosts.
      config: what the program gets as its first argument, with its host added.
      threads: for OpenMP; 0: as many as there are cores.
      seconds: after which a missing answer is an error.
    """
    environment = os.environ | _MALLOC | {"GLOO_SOCKET_IFNAME": "eth0"}
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads)}
    root = str(_HERE.parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (root, os.environ.get("PYTHONPATH", "")))
    )
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory(prefix="network-logs-") as folder:
        logs = [Path(folder, f"{host}.log") for host in range(len(hosts.addresses))]
        try:
            for host, log in enumerate(logs):
                own = config | {"host": host, "name": hosts.host_name(host)}
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        [
                            *hosts.command(host),
                            *(sys.executable, str(_HERE / program), json.dumps(own)),
                        ],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        env=environment,
                        # Ctrl-C is for the program that cleans up.
                        start_new_session=True,
                    )
                processes.append(process)
            group = Workers(processes, logs, seconds)
            group.answers("start")
            yield group
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
                process.stdin.close()
                process.stdout.close()
