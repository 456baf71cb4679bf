"""The coordinator of a job whose processes may die: ``python -m optax_ext.elastic``."""

import argparse
import signal
import sys
import threading

from optax_ext.elastic import _jax_internals


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
    _, colon, port = options.address.rpartition(":")
    if not colon or not port.isdigit():
        parser.error(f"--address must be host:port, got {options.address!r}")
    for name in ("processes", "heartbeat_seconds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    try:
        service = _jax_internals.serve(
            options.address, options.processes, options.heartbeat_seconds
        )
    except RuntimeError as error:
        print(f"can't listen at {options.address}: {error}", file=sys.stderr)
        return 2
    print(f"coordinates {options.processes} processes at {options.address}", flush=True)
    end.wait()
    del service
    return 0


if __name__ == "__main__":
    sys.exit(main())
