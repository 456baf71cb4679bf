"""Compares predicted and measured steps on the hosts that you have, and checks the replicas.

    python -m benchmarks.gpu.hosts --coordinator 10.0.0.1:9000 --processes 2 --process 0

Run it on each host, with another ``--process``; the first host is the coordinator. Every device of
the hosts is a worker. Without ``--coordinator`` the workers are the devices of this process
(JAX_NUM_CPU_DEVICES=4 tries it without a GPU).

First it measures latency and bandwidth by the times of collectives. From these the planner predicts
the step of each optimizer; a step has no model, but an exchange of given gradients and an update.
Then the optimizers take steps in turns, after which every worker must have the same bits. The
status is 1 if one has others.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import optax_ext
from sparse_collectives import _units, cost_model, transport
from sparse_collectives.planner._measure import measure
from sparse_collectives.planner._optimizers import optimizers
from sparse_collectives.planner._ways import CPU, GPU, predict_step

from .._common import options, reports, timing
from .._common.contestants import RATE
from .._common.display import show_rows
from .._common.options import InputError
from ..network._problem import SHAPES
from ._predicted import DENSITY, WAYS

AXIS = "workers"
_TURNS = 2
# Steps before the times count: they compile, and the selection settles.
_BEFORE = 5


def _made(name: str) -> optax.GradientTransformation:
    if name == "sparse_adamw":
        return optax_ext.sparse_adamw(RATE, density=DENSITY, axis=AXIS)
    exchange = {
        "dense": lambda: optax_ext.dense(axis=AXIS),
        "float16": lambda: optax_ext.dense(axis=AXIS, dtype="float16"),
        "powersgd(1)": lambda: optax_ext.powersgd(1, axis=AXIS),
    }[name]()
    return optax.chain(exchange, optax.adamw(RATE))


# The prediction of each contestant; without a model nothing overlaps.
_PREDICTED = {
    "dense": "dense",
    "float16": "dense, float16, overlapped",
    "sparse_adamw": "sparse_adamw",
    "powersgd(1)": "powersgd(1)",
}


class Trial:
    """The steps of one optimizer, with gradients that are given."""

    def __init__(self, name: str, mesh: Mesh, shapes: list[tuple[int, ...]]):
        whole = NamedSharding(mesh, PartitionSpec())
        self._params = jax.jit(lambda: [jnp.zeros(x) for x in shapes], out_shardings=whole)()
        tx = _made(name)
        self._state = optax_ext.init_state(tx, self._params, mesh)
        self._step = optax_ext.make_train_step(_product, tx, mesh)
        self._mesh = mesh

    def __call__(self, batch: Any) -> jax.Array:
        """Takes a step."""
        self._params, self._state, loss = self._step(self._params, self._state, batch)
        return loss

    def words(self) -> float | None:
        """4-byte words that a worker received in the last step, if the optimizer counts them."""
        info = optax_ext.get_info(self._state)
        return None if info is None else float(info.words)

    def same(self) -> bool:
        """Whether the parameters of all workers have the same bits."""

        def compared(params: Any) -> jax.Array:
            mark = sum(map(_mark, jax.tree.leaves(params)))
            marks = transport.all_gather(mark[None], AXIS).ravel()
            return jnp.all(marks == marks[0])[None]

        ins, outs = PartitionSpec(), PartitionSpec(AXIS)
        found = jax.shard_map(
            compared, mesh=self._mesh, in_specs=ins, out_specs=outs, check_vma=False
        )
        here = jax.jit(found)(self._params).addressable_shards
        return all(bool(shard.data.all()) for shard in here)


def _product(params: Any, batch: Any) -> jax.Array:
    """A loss whose gradients are the batch of the worker."""
    pairs = zip(params, batch, strict=True)
    return sum((jnp.sum(p * b[0]) for p, b in pairs), jnp.float32(0))


def _mark(leaf: jax.Array) -> jax.Array:
    """A sum of the bits, each entry with a factor of its own."""
    bits = jax.lax.bitcast_convert_type(leaf.ravel(), jnp.uint32)
    places = jax.lax.iota(jnp.uint32, bits.size)
    return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)


def _batches(mesh: Mesh, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Gradients of all workers, made on their devices."""
    split = NamedSharding(mesh, PartitionSpec(AXIS))

    def make(turn: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(turn), len(shapes))
        pairs = zip(keys, shapes, strict=True)
        drawn = (jax.random.normal(key, (mesh.size, *shape)) for key, shape in pairs)
        # With heavy tails, as gradients have them.
        return [1e-3 * x * jnp.abs(x) for x in drawn]

    made = jax.jit(make, out_shardings=split)
    return [made(turn) for turn in range(_TURNS)]


def _predictions(mesh: Mesh, size: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each step by name, and the measured latency and bandwidth."""
    found = measure(mesh, rounds=rounds)
    local = CPU if jax.devices()[0].platform == "cpu" else GPU
    load = cost_model.Workload(size, max(1, round(DENSITY * size)), mesh.size)
    ways = {(way.name, way.codec): way for way in optimizers(load, local)}
    steps = {
        name: predict_step(ways[WAYS[planned][:2]], found.network(), 0.0).step
        for name, planned in _PREDICTED.items()
    }
    return steps, {
        "latency_us": 1e6 * found.latency,
        "gbit_per_s": 8e-9 * found.bandwidth,
        "error": found.error,
    }


def _join(args: argparse.Namespace) -> None:
    given = (args.coordinator, args.processes, args.process)
    if given == (None, None, None):
        return
    if None in given:
        raise InputError(
            "--coordinator, --processes and --process belong together: give all three on each "
            "host, or none of them for the devices of one process."
        )
    if not 0 <= args.process < args.processes:
        raise InputError(
            f"--process must be from 0 to {args.processes - 1}, the number of this host, got "
            f"{args.process}."
        )
    jax.distributed.initialize(
        args.coordinator, num_processes=args.processes, process_id=args.process
    )


@options.program
def main(argv: list[str] | None = None) -> int:
    """Prints predictions and measurements; returns 1 if the replicas differ."""
    parser = options.parser_of(__doc__, "only", "json", "processes", rounds=15)
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="address of the first host, and a free port")
    add("--process", type=options.at_least(0), help="the number of this host, from 0")
    add("--params", default="124M", metavar="N", help="parameters, in the leaves of a GPT")
    args = parser.parse_args(argv)
    options.check_names(parser, args.only, _PREDICTED)
    try:
        size = _units.count("--params", args.params)
    except ValueError as error:
        raise InputError(str(error)) from error
    _join(args)
    if jax.device_count() < 2:
        raise InputError(
            "there is one device, which exchanges nothing. Give --coordinator on several hosts, or "
            "set JAX_NUM_CPU_DEVICES=4 to try it without a GPU."
        )
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    shapes = SHAPES["gpt2"](size)
    predicted, network = _predictions(mesh, size, args.rounds)
    batches = _batches(mesh, shapes)
    trials = {name: Trial(name, mesh, shapes) for name in args.only or _PREDICTED}
    runs = {
        name: lambda turn, trial=trial: trial(batches[turn % _TURNS])
        for name, trial in trials.items()
    }
    for run in runs.values():
        for turn in range(_BEFORE):
            jax.block_until_ready(run(turn))
    times = timing.in_turns(runs, args.rounds)
    same = {name: trial.same() for name, trial in trials.items()}
    rows, base = [], next(iter(times))
    for name, trial in trials.items():
        quartiles = timing.quartiles([1e3 * x for x in times[name]])
        row = {"optimizer": name, "ms": quartiles, "ms, predicted": 1e3 * predicted[name]}
        row[f"ratio to {base}"] = timing.quartiles(timing.over(times[name], times[base]))
        rows.append(row | {"words": trial.words(), "same bits": str(same[name])})
    if jax.process_index() == 0:
        device = jax.devices()[0].device_kind
        title = f"{size:,} parameters, {mesh.size} workers on {device}; the network: "
        title += f"{network['latency_us']:.3g} us, {network['gbit_per_s']:.3g} Gbit/s"
        show_rows(title, rows)
        content = {"device": device, "jax": jax.__version__, "parameters": size}
        content |= {"workers": mesh.size, "network": network, "rows": rows}
        reports.write(args.json, content)
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
