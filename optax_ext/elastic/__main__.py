"""The coordinator of a job whose processes may die: ``python -m optax_ext.elastic``."""

import argparse
import errno
import os
import signal
import socket
import sys
import threading

from optax_ext.elastic import _jax_internals
from optax_ext.elastic._arguments import check_counts, host_and_port


def main() -> int:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_ext.elastic",
        description="Runs the coordinator of a job until it is interrupted. It keeps a list of the "
        "workers, and no data. When it ends, all workers end with status 75.",
    )
    parser.add_argument(
        "--address", required=True, help="host:port to listen at, such as 0.0.0.0:1234"
    )
    parser.add_argument("--processes", type=int, required=True, help="the largest set of workers")
    parser.add_argument(
        "--heartbeat-seconds",
        type=int,
        default=10,
        help="a worker without a heartbeat for this long counts as dead (default: 10)",
    )
    options = parser.parse_args()
    try:
        place = host_and_port(options.address, "--address")
        check_counts(**{"--processes": options.processes})
        check_counts(**{"--heartbeat-seconds": options.heartbeat_seconds})
    except ValueError as error:
        parser.error(str(error))
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    try:
        _check_free(*place)
        service = _jax_internals.serve(
            options.address, options.processes, options.heartbeat_seconds
        )
    except (OSError, RuntimeError) as error:
        print(f"can't listen at {options.address}: {error}", file=sys.stderr)
        return 2
    print(f"coordinates {options.processes} processes at {options.address}", flush=True)
    end.wait()
    del service
    return 0


def _check_free(host: str, port: int) -> None:
    """Raises an OSError if this process can't listen there, or another one does.

    jax would share the port with another coordinator, and end with a segmentation fault if it can't
    listen.
    """
    errors, places = [], socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, place in places:
        try:
            with socket.socket(family) as ours, socket.socket(family) as other:
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                    ours.setsockopt(socket.SOL_SOCKET, option, 1)
                ours.bind(place)
                if other.connect_ex(place) == 0:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        except OSError as error:
            errors.append(error)
    # A name may stand for an address of a kind that this machine does not use.
    if fatal := [x for x in errors if x.errno == errno.EADDRINUSE or len(errors) == len(places)]:
        raise fatal[0]


if __name__ == "__main__":
    sys.exit(main())
