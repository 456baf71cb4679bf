"""Joining the processes of a training, on one host or many."""

import argparse
import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator

import jax

from _data import InputError
from _options import positive

# jax itself reads JAX_COORDINATOR_ADDRESS, and the variables of SLURM and of Open MPI up to 4.
COUNTS = ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
IDS = ("JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
DETECTED = ("OMPI_MCA_orte_hnp_uri", "SLURM_STEP_NODELIST", "TPU_WORKER_HOSTNAMES")


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the options that identify this process among all of them."""
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    add("--num-processes", type=int, metavar="N", help="processes of all hosts")
    add("--process-id", type=int, metavar="I", help="of this process, 0 to N-1")
    add("--timeout", type=positive, default=120, help="seconds for the processes to meet (120)")
    add("--devices", type=positive, help="CPU devices of this process (1)")


def start(options: argparse.Namespace) -> None:
    """Joins the processes, if there are several; then jax has the devices of all of them.

    Raises:
      InputError: the options and the environment do not identify this process.
    """
    coordinator = options.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = _number("--num-processes", options.num_processes, COUNTS)
    process = _number("--process-id", options.process_id, IDS)
    detected = any(name in os.environ for name in DETECTED)
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    if (coordinator, count, process) == (None, None, None) and not detected:
        return
    given = {"--coordinator": coordinator, "--num-processes": count, "--process-id": process}
    missing = [name for name, value in given.items() if value is None]
    if missing and not detected:
        raise InputError(f"{' and '.join(missing)} must be given, or be in the environment")
    if count is not None and count < 1:
        raise InputError(f"--num-processes is {count}; it must be 1 or more")
    if process is not None and process < 0 or None not in (count, process) and process >= count:
        raise InputError(f"--process-id is {process}, of {count} processes: give 0 to {count - 1}")
    if coordinator is not None:
        _, colon, port = coordinator.rpartition(":")
        if not colon or not re.fullmatch(r"\d{1,5}", port) or int(port) >= 2**16:
            raise InputError(f"--coordinator is {coordinator!r}; expected HOST:PORT")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        raise InputError(
            f"the name of this host, {socket.gethostname()}, has no address, which CPU "
            "collectives need: add it to /etc/hosts"
        ) from error
    with _end_after(options.timeout, f"{coordinator or 'the coordinator'}", count):
        # A timeout of jax would end the process without an exception, so it gets more time.
        seconds = options.timeout + 60
        try:
            jax.distributed.initialize(coordinator, count, process, initialization_timeout=seconds)
        except RuntimeError as error:
            raise InputError(
                f"the processes cannot meet at {coordinator or 'the coordinator'}, whose port may "
                f"be in use: {str(error).splitlines()[0]}"
            ) from error


@contextlib.contextmanager
def _end_after(seconds: int, address: str, count: int | None) -> Iterator[None]:
    program = os.path.basename(sys.argv[0])

    def end():
        print(
            f"{program}: the {count or ''} processes have not met at {address} within "
            f"{seconds} s: start all of them, and check that the address can be reached",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _number(option: str, given: int | None, names: tuple[str, ...]) -> int | None:
    if given is not None:
        return given
    for name in names:
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise InputError(f"{name} is {value!r}; expected a number, for {option}")
            return int(value)
    return None
