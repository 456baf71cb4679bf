"""Several processes of this program, on this machine or on others."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import jax

_ROOT = Path(__file__).resolve().parents[2]


def join(coordinator: str, workers: int, process: int) -> None:
    """Makes this process one of the group, before anything else of jax runs."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, workers, process, cluster_detection_method="deactivate")


def on_loopback(argv: Sequence[str], workers: int) -> int:
    """Runs this program as that many processes on this machine; what the first prints is shown.

    Args:
      argv: options, without those that say which process it is.
      workers: how many.

    Returns:
      The first status that is not 0, or 0. Then the others are ended, which would wait for it.
    """
    with socket.socket() as holder:
        # jax's coordinator binds with SO_REUSEPORT too; no other program gets the port meanwhile.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        program = [sys.executable, "-m", "examples.linear_models", *argv, "--coordinator", address]
        processes: list[subprocess.Popen[str]] = []
        changed = threading.Condition()
        statuses: list[int] = []

        def wait(process: subprocess.Popen[str]) -> None:
            status = process.wait()
            with changed:
                statuses.append(status)
                changed.notify_all()

        try:
            for number in range(workers):
                processes.append(
                    subprocess.Popen(
                        [*program, "--process-id", str(number)],
                        env=environment,
                        stdout=subprocess.DEVNULL if number else subprocess.PIPE,
                        text=True,
                    )
                )
            threads = [threading.Thread(target=wait, args=(p,), daemon=True) for p in processes]
            threads.append(threading.Thread(target=_show, args=(processes[0],), daemon=True))
            for thread in threads:
                thread.start()
            with changed:
                changed.wait_for(lambda: any(statuses) or len(statuses) == workers)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                process.wait()
        threads[-1].join()
        return next((status for status in statuses if status), 0)


def _show(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            # Gloo writes lines of its own.
            if not line.startswith("[Gloo]"):
                print(line, end="", flush=True)
