"""Starts groups of real processes on this machine, and ends them whatever happens."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
TIMEOUT = 600.0  # seconds for a group; on an idle machine it takes less than one of them in ten


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback interface that no other program gets while this is open.

    jax's coordinator shares it, because it binds with SO_REUSEPORT too.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def environment(port: int) -> dict[str, str]:
    """That of this process, without what would make a group of something else."""
    foreign = ("SLURM_", "OMPI_", "PMI_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS_ID")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
    }


def finish(commands: Sequence[Sequence[str]], port: int, folder: Path) -> list[tuple[int, str]]:
    """Runs the commands at once; status and output of each.

    The first that fails ends all: the others would wait for it in a collective.
    """
    ended: queue.Queue[int] = queue.Queue()
    processes: list[subprocess.Popen] = []
    watchers: list[threading.Thread] = []
    logs = [folder / f"{os.urandom(4).hex()}.{rank}.log" for rank in range(len(commands))]

    def watch(process: subprocess.Popen) -> None:
        ended.put(process.wait())

    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment(port),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
            watchers.append(threading.Thread(target=watch, args=(process,)))
            watchers[-1].start()
        deadline = time.monotonic() + TIMEOUT
        for _ in commands:
            if ended.get(timeout=max(0.0, deadline - time.monotonic())) != 0:
                break
    except queue.Empty:
        pass  # the output says how far each came
    finally:
        for process in processes:
            process.kill()  # of those that have ended it is a no-op
        for watcher in watchers:
            watcher.join()
    return [
        (process.returncode, log.read_text(errors="replace"))
        for process, log in zip(processes, logs, strict=True)
    ]


def run_group(
    folder: Path, processes: int, devices: int, cases: Sequence[tuple[str, str, dict]]
) -> dict[str, list[dict[str, np.ndarray]]]:
    """What each process returned of each case.

    Args:
      folder: for the files of the group; checkpoints are saved in it.
      processes: of the group.
      devices: of each process.
      cases: name, case of `_cases.py`, and its options.

    Raises:
      AssertionError: a process failed or took too long; with the output of all.
    """
    with reserved_port() as port:
        options = {
            "coordinator": f"127.0.0.1:{port}",
            "processes": processes,
            "devices": devices,
            "cases": list(cases),
            "folder": str(folder),
        }
        worker = [sys.executable, "-m", "tests.multiprocess._worker"]
        commands = [
            [*worker, json.dumps({**options, "process": process})] for process in range(processes)
        ]
        results = finish(commands, port, folder)
    if any(status for status, _ in results):
        raise AssertionError(
            "\n".join(f"== process {i}: status {s}\n{out}" for i, (s, out) in enumerate(results))
        )
    return {
        name: [dict(np.load(folder / f"{name}.{process}.npz")) for process in range(processes)]
        for name, _, _ in cases
    }
