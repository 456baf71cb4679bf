"""Sums and gathers over links, in the ring of Gloo and by direct messages.

    sudo python -m benchmarks.network.sums --workers 4 8 --link 1gbit 100mbit 100mbit+50ms

Each collective of float32 is compiled alone. They take turns, and a ratio is within one round.
Linux only, with root and iproute2 (ip, tc).
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_collectives import transport
from sparse_collectives.transport import _direct

from .._common import display, namespaces, options, timing
from .._common.worker import Stepper, barrier
from ._workers import all_of, counted, groups, in_turns

AXIS = "workers"
COLLECTIVES = ("psum", "all_gather")
# Direct messages of any size, including sizes that `use_direct_messages` leaves in the ring.
RING, DIRECT = "ring", "direct"
MODULES = {RING: transport, DIRECT: _direct}


class Worker(Stepper):
    """The role of a host: each collective of each size, in both ways."""

    def __init__(self, config: dict[str, Any]):
        self._mesh = jax.make_mesh((config["workers"],), (AXIS,), axis_types=(AxisType.Auto,))
        self.barrier = barrier(self._mesh)
        self._compiled: dict[str, Any] = {}

    def prepare(self, method: str) -> dict[str, Any]:
        """Compiles a collective, named ``psum ring 4096``, and takes it twice."""
        name, way, size = method.split()
        split = NamedSharding(self._mesh, P(AXIS))
        mine = jnp.ones((1, int(size)))
        x = jax.make_array_from_process_local_data(split, mine)
        collective = getattr(MODULES[way], name)
        mapped = jax.shard_map(
            lambda x: collective(x[0], AXIS), mesh=self._mesh, in_specs=P(AXIS), out_specs=P()
        )
        self._compiled[method] = jax.jit(mapped).lower(x).compile(), x
        self._take(method, 2)
        return {"ready": True}

    def _take(self, method: str, steps: int) -> None:
        collective, x = self._compiled[method]
        for _ in range(steps):
            jax.block_until_ready(collective(x))


@options.program
def main(argv: list[str] | None = None) -> None:
    """Measures, prints, and writes the requested file."""
    usual = options.LINKS | {"workers": [4], "rounds": 5, "steps": 3, "timeout": 300}
    usual |= {"params": ([1, 4096, 65536, 262144, 1048576], "entries of each worker")}
    usual |= {"quick": (False, "a functional test with small sums")}
    args = options.parser_of(__doc__, "json", **usual).parse_args(argv)
    if args.quick:
        args.params, args.rounds, args.steps = [1, 100], 2, 1
    all_of(args, args.workers, _measured, _show)


def _measured(args: argparse.Namespace, workers: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of each link, as soon as they are measured."""
    cases = [(name, size) for name in COLLECTIVES for size in args.params]
    with (
        namespaces.network(workers) as hosts,
        groups(hosts, {}, pin=not args.no_pin, seconds=args.timeout) as group_of,
    ):
        group = group_of(f"{__package__}.sums:Worker")
        methods = [f"{name} {way} {size}" for name, size in cases for way in (RING, DIRECT)]
        for method in methods:
            group.ask("prepare", method=method)

        def ask(method: str) -> list[dict[str, Any]]:
            return group.ask("measure", method=method, steps=args.steps)

        for link in args.link:
            hosts.limit(link)
            found = in_turns(ask, methods, args.rounds, f"P = {workers}, {link}")
            hosts.limit("none")
            rows = []
            for name, size in cases:
                pair = {way: counted(found[f"{name} {way} {size}"]) for way in (RING, DIRECT)}
                row = {"workers": workers, "link": link, "collective": name, "size": size}
                rows.append(row | {way: counts["seconds"] for way, counts in pair.items()})
            yield rows


def _show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    lines = [
        {
            "": row["collective"],
            "entries": row["size"],
            "ring ms": 1e3 * timing.quartiles(row[RING])[1],
            "direct ms": 1e3 * timing.quartiles(row[DIRECT])[1],
            "times as fast": timing.times_as_fast(row[RING], row[DIRECT]),
        }
        for row in rows
    ]
    display.show_rows(f"P = {rows[0]['workers']}, {rows[0]['link']}", lines)


if __name__ == "__main__":
    raise SystemExit(main())
