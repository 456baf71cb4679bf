"""The program on a host of a network, which joins the others and carries out commands.

    python -m benchmarks._common.worker MODULE:CLASS '{"host": 0, "workers": 4, ...}'

The class is a role: it is made from the dictionary, and its methods are the commands. It has a
``barrier()``, ``TORCH = True`` if the processes are a group of PyTorch and not of JAX, and
``DEVICES`` if each process has several. A command is a line of JSON on standard input, and its
answer is one on standard output; neither goes over the network that is measured.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .processes import die_with_parent


def main(place: str, given: str) -> None:
    """Carries out commands until the input ends; the first answer says that it is ready."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints goes to standard error and not between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = json.loads(given)
    if config["pin"]:
        # Before any library counts the cores.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[config["host"] % len(cores)]})
    module, _, name = place.partition(":")
    role = getattr(importlib.import_module(module), name)
    config = {"devices": getattr(role, "DEVICES", 1)} | config
    (_join_torch if getattr(role, "TORCH", False) else _join_jax)(config)
    worker = role(config)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(getattr(worker, request.pop("do"))(**request))
        except Exception as error:
            traceback.print_exc()
            answer({"failure": f"{type(error).__name__}: {error}".splitlines()[0]})


def _join_jax(config: dict[str, Any]) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", config["devices"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        config["coordinator"],
        num_processes=config["workers"],
        process_id=config["host"],
        cluster_detection_method="deactivate",
    )
    if config.get("direct"):
        from sparse_collectives import transport

        transport.use_direct_messages()


def _join_torch(config: dict[str, Any]) -> None:
    import torch

    # A setup that PyTorch advises against would warn at each step.
    warnings.simplefilter("once")
    if config["pin"]:
        torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{config['coordinator']}",
        world_size=config["workers"],
        rank=config["host"],
    )


class Stepper:
    """A role that takes steps of a method; subclasses define ``_take`` and ``barrier``."""

    def measure(self, method: str, steps: int) -> dict[str, Any]:
        """Seconds, bytes and words of a step, as the mean of so many."""
        return measured(self.barrier, lambda: self._take(method, steps), steps)


def barrier(mesh: Any) -> Callable[[], None]:
    """A function that returns when the processes of all devices of a mesh have called it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    axis = mesh.axis_names
    own = jnp.ones((len(mesh.local_devices),))
    token = jax.make_array_from_process_local_data(NamedSharding(mesh, P(axis)), own)
    summed = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=P(axis), out_specs=P())
    )

    def wait() -> None:
        summed(token).block_until_ready()

    wait()
    return wait


def measured(
    barrier: Callable[[], None], take: Callable[[], list[float] | None], steps: int
) -> dict[str, Any]:
    """Seconds, bytes and words of a step, as the mean of the steps that ``take`` takes."""
    barrier()
    before = _interface_bytes()
    start, busy = time.perf_counter(), time.process_time()
    words = take()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    # After a barrier, everything that others had to send for these steps has arrived.
    barrier()
    received, sent = (a - b for a, b in zip(_interface_bytes(), before, strict=True))
    return {
        "seconds": seconds / steps,
        "cpu_seconds": busy / steps,
        "received": received / steps,
        "sent": sent / steps,
        "words": sum(words) / steps if words else None,
    }


def _interface_bytes() -> tuple[int, ...]:
    """Bytes that this host has received and sent, headers included."""
    folder = Path("/sys/class/net/eth0/statistics")
    return tuple(int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


if __name__ == "__main__":
    main(*sys.argv[1:])
