"""Starts groups of processes for the tests, which join by ``jax.distributed``."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from benchmarks._common import processes as launcher
from benchmarks._common.processes import ROOT, Process, coordinator, started

# Seconds for a group; on an idle machine it takes less than 1/10 of them.
TIMEOUT = 600.0
Ended = list[tuple[int | None, str]]


@contextlib.contextmanager
def group(
    module: str, processes: int, *, changes=None, network=None, variables=None, **settings
) -> Iterator[list[Process]]:
    """Processes of ``python -m module JSON``, for the length of the block.

    The module calls :func:`join` with the result of :func:`settings`: the common settings, with
    the changes for single processes. In a network each process has a namespace of its own. The
    variables are added to the environment of this process.
    """
    with contextlib.ExitStack() as stack:
        variables = dict(variables or {})
        if network:
            # In a namespace of its own every port is free.
            place = f"{network.addresses[0]}:20000"
        else:
            place, bound = stack.enter_context(coordinator())
            variables |= bound
        commands = []
        for index in range(processes):
            own = {"coordinator": place, "processes": processes, "index": index, **settings}
            own |= (changes or {}).get(index, {})
            command = [sys.executable, "-m", module, json.dumps(own)]
            commands.append([*network.command(index), *command] if network else command)
        yield stack.enter_context(started(commands, variables))


def finish(processes: contextlib.AbstractContextManager[list[Process]]) -> Ended:
    """Status and output of each process; a failed one ends the others."""
    with processes as each:
        launcher.wait_for_ends(each, TIMEOUT)
    return [(process.status, process.output) for process in each]


def example(name: str, processes: int, *options: str, ids: tuple[int, ...] | None = None) -> Ended:
    """Status and output of each process of an example, as a user starts it.

    The example gets the number of processes; those with the ids are started, by default all.
    """
    program = [sys.executable, str(ROOT / "examples" / name)]
    with coordinator() as (address, bound):
        told = ["--coordinator", address, "--num-processes", str(processes)]
        each = range(processes) if ids is None else ids
        commands = [[*program, *told, "--process-id", str(i), *options] for i in each]
        results = finish(started(commands, bound))
    return [(status, output.replace(address, "ADDRESS")) for status, output in results]


def settings() -> dict[str, Any]:
    """The settings with which this process was started."""
    return json.loads(sys.argv[1])


def join(settings: Mapping[str, Any], devices: int = 1, **more: Any) -> None:
    """Makes this process one of its group, with this number of devices of its own."""
    launcher.die_with_parent()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(
        settings["coordinator"],
        settings["processes"],
        settings["index"],
        # The tests may run under SLURM.
        cluster_detection_method="deactivate",
        **more,
    )


def say(event: str, **values: Any) -> None:
    """One line for the program that waits for it."""
    print(json.dumps({"event": event, **values}), flush=True)


def run(main: Callable[[], None]) -> None:
    """Runs the program of one process of a group."""
    try:
        main()
    except Exception:
        # Exits at once, since the others wait until this process is gone.
        traceback.print_exc()
        os._exit(1)
