"""Steps of sites that shard their parameters, over links with a limited bandwidth between them.

    sudo python -m benchmarks.network.sites --links 1gbit 100mbit --layout fsdp tensor

A site is a network namespace and a process of several devices. They share the parameters of a
perceptron with residual layers by FSDP or by tensor parallelism, and only sites exchange over the
links. Methods take turns, and a ratio is within one round. docs/sharded.md explains the results.
Linux only, with root and iproute2 (ip, tc).
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_ext

from .._common import contestants, display, namespaces, options, timing
from .._common.worker import Stepper, barrier
from ._workers import all_of, counted, groups, in_turns

# The contestant for each name; AdamW follows an exchange that is not a complete optimizer.
METHODS = {"dense": "dense/leaves", "ok_topk": "ok_topk", "sparse_adamw": "sparse_adamw"}
LAYOUTS = ("fsdp", "tensor")


class Worker(Stepper):
    """The role of a site: training steps of one model, sharded in one way, for each method."""

    def __init__(self, config: dict[str, Any]):
        self._density, self._layers = config["density"], config["layers"]
        shape, axes = (config["workers"], config["devices"]), ("site", "model")
        self._mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2)
        self.barrier = barrier(self._mesh)
        random = np.random.default_rng(config["seed"])
        width, fsdp = config["width"], config["layout"] == "fsdp"

        def placed(shape: tuple[int, int], spec: PartitionSpec, scale: float = 1.0) -> Any:
            whole = random.standard_normal(shape, np.float32) * np.float32(scale)
            where = NamedSharding(self._mesh, spec)
            return jax.make_array_from_callback(shape, where, lambda at: whole[at])

        rows = PartitionSpec("model")
        columns = rows if fsdp else PartitionSpec(None, "model")
        self._params = {}
        for i in range(self._layers):
            up, down = (width, 4 * width), (4 * width, width)
            self._params[f"up{i}"] = placed(up, columns, up[0] ** -0.5)
            self._params[f"down{i}"] = placed(down, rows, down[0] ** -0.5)
        self._batch_spec = PartitionSpec(axes if fsdp else "site")
        self._batch = placed((config["batch"], width), self._batch_spec)
        self._methods: dict[str, Any] = {}

    def _loss(self, params: Any, x: jax.Array) -> jax.Array:
        y = x
        for i in range(self._layers):
            y = y + jnp.tanh(y @ params[f"up{i}"]) @ params[f"down{i}"]
        return jnp.mean((y - jnp.roll(x, 1, axis=1)) ** 2)

    def prepare(self, method: str, warmup: int) -> dict[str, Any]:
        """Compiles a method's step and takes some; returns the number of parameters."""
        tx = contestants.optimizer(f"{METHODS[method]}/adamw", self._density, "site")
        params = jax.tree.map(jnp.copy, self._params)
        state = optax_ext.init_state(tx, params, self._mesh)
        step = optax_ext.make_train_step(self._loss, tx, self._mesh, batch_spec=self._batch_spec)
        self._methods[method] = step, params, state
        self._take(method, warmup)
        return {"size": sum(x.size for x in jax.tree.leaves(params))}

    def _take(self, method: str, steps: int) -> list[float]:
        step, params, state = self._methods[method]
        for _ in range(steps):
            params, state, loss = step(params, state, self._batch)
            jax.block_until_ready(loss)
        self._methods[method] = step, params, state
        # Every step has the same words, and programs return a list.
        return [float(optax_ext.get_info(state).words)] * steps


@options.program
def main(argv: list[str] | None = None) -> None:
    """Measures, prints, and writes the requested file."""
    usual = {"sites": 2, "devices": (2, "of each site"), "density": 0.01, "layers": 4}
    usual |= {"width": (512, "of a layer, 8 width^2 parameters")}
    usual |= {"batch": (16, "examples of all sites together"), "rounds": 5, "steps": 3, "seed": 0}
    usual |= {"timeout": 900, "links": ["1gbit", "100mbit"]}
    usual |= {"layout": (list(LAYOUTS), None, LAYOUTS)}
    usual |= {"quick": (False, "a functional test with a small model")}
    made = options.parser_of(__doc__, "json", **usual)
    args = made.parse_args(argv)
    if args.quick:
        args.width, args.layers, args.rounds, args.steps = 32, 2, 2, 1
    share = args.sites * args.devices
    if args.batch % share or args.width % args.devices:
        made.error(f"--batch and --width must be multiples of the devices: {share} in all")
    all_of(args, args.layout, _measured, _show)


def _measured(args: argparse.Namespace, layout: str) -> Iterator[list[dict[str, Any]]]:
    """The rows of each link, as soon as they are measured."""
    given = ("devices", "density", "width", "layers", "batch", "seed")
    config = {"layout": layout, **{name: getattr(args, name) for name in given}}
    with (
        namespaces.network(args.sites) as hosts,
        groups(hosts, config, seconds=args.timeout) as group_of,
    ):
        group = group_of(f"{__package__}.sites:Worker")
        size = 0
        for method in METHODS:
            options.say(f"{layout}: compiling {method}")
            size = group.ask("prepare", method=method, warmup=4)[0]["size"]

        def ask(method: str) -> list[dict[str, Any]]:
            return group.ask("measure", method=method, steps=args.steps)

        for link in args.links:
            hosts.limit(link)
            found = in_turns(ask, list(METHODS), args.rounds, f"{layout}, {link}")
            hosts.limit("none")
            yield [
                {"layout": layout, "link": link, "size": size, "method": method}
                | {"words": rounds[0][0]["words"], **counted(rounds, "received")}
                for method, rounds in found.items()
            ]


def _show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    base, lines = rows[0], []
    for row in rows:
        line = {"": row["method"], "step s": timing.quartiles(row["seconds"])[1]}
        line["times as fast"] = timing.times_as_fast(base["seconds"], row["seconds"])
        received = timing.quartiles(row["received"])[1] / 1e6
        lines.append(line | {"words": row["words"], "MB received": received})
    title = (
        f"{base['layout']}, {base['link']}: {args.sites} sites of {args.devices} devices, "
        f"n = {base['size']:,}, density {args.density:g}"
    )
    display.show_rows(title, lines)


if __name__ == "__main__":
    raise SystemExit(main())
