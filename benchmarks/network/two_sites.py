"""Runs an example: two sites of two devices train a sharded model over a link with latency.

    sudo python -m benchmarks.network.two_sites --link 50mbit+100ms -- --every 10 --direct

Each site is a process of two devices on a host of its own, which runs examples/train_sharded.py
with the options after ``--``. The output of the first site is printed. Linux only, with root and
iproute2 (ip, tc).
"""

import argparse
import sys
from collections.abc import Sequence

from .._common import namespaces, options
from .._common.processes import ROOT, Process, started, wait
from ._workers import WorkerError

SITES, DEVICES, PORT = 2, 2, 9000


def run(link: str, given: Sequence[str], seconds: float) -> str:
    """The output of the first site; a WorkerError if one of them fails, or takes longer."""
    program = [sys.executable, str(ROOT / "examples" / "train_sharded.py"), *given]
    program += ["--sites", str(SITES), "--devices", str(DEVICES), "--num-processes", str(SITES)]
    with namespaces.network(SITES) as hosts:
        hosts.limit(link)
        place = f"{hosts.addresses[0]}:{PORT}"
        commands = [
            [*hosts.command(host), *program, "--coordinator", place, "--process-id", str(host)]
            for host in range(SITES)
        ]
        more = {"GLOO_SOCKET_IFNAME": "eth0", "JAX_PLATFORMS": "cpu"}
        with started(commands, more) as processes:
            wait(processes, lambda: all(x.ended_at is not None for x in processes), seconds)
            return _said(processes, seconds)


def _said(processes: Sequence[Process], seconds: float) -> str:
    for site, process in enumerate(processes):
        if process.status is None:
            raise WorkerError(f"site {site} did not end within {seconds:g} s")
        if process.status:
            last = process.errors.strip().splitlines() or ["it said nothing"]
            raise WorkerError(f"site {site} ended with status {process.status}: {last[-1]}")
    return processes[0].output


@options.program
def main(argv: list[str] | None = None) -> None:
    """Runs the example, and prints its output."""
    usual = {"link": "50mbit+100ms", "timeout": 600}
    parser = options.parser_of(__doc__, **usual)
    parser.add_argument("given", nargs=argparse.REMAINDER, help="options of the example")
    args = parser.parse_args(argv)
    options.require_network()
    print(run(args.link, [x for x in args.given if x != "--"], args.timeout), end="")


if __name__ == "__main__":
    raise SystemExit(main())
