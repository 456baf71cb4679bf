"""What a step of the transformation costs on one worker, beside `lax.top_k` alone.

    python -m benchmarks.local.step_cost [--size 14728266] [--density 0.01] [--json FILE]

All contestants run in one process, one after the other in each round, and each
time is divided by that of `lax.top_k(abs(acc), k)` in the same round: the table
gives the median ratio and its quartiles. A step is the whole `update`: the check
for non-finite values, error feedback, selection, the allreduce of one worker,
the new residual and the dense update. `acc` is the accumulator of such a step.

The memory of a training step is read from the compiled programs, for a flat
gradient and for one of the given number of leaves, beside that of the dense
transformation.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext

from .._common import options, reports, timing
from .._common.contestants import find
from .._common.display import show

AXIS = "workers"
BASE = "lax.top_k(abs(acc), k) alone"
DENSE = "dense (psum)"
NAMES = {DENSE: "dense/leaves", "ok_topk": "ok_topk", "ok_topk, threshold_reuse": "ok_topk/reuse"}


def transformations(density):
    """The contestants that are gradient transformations, by name."""
    return {name: find(contestant).make(density, AXIS) for name, contestant in NAMES.items()}


def one_device_mesh():
    """A mesh of the first device."""
    return jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


def gradient_stream(size, data, seed):
    """Four heavy-tailed gradients, by option of a scale that differs by layer."""
    rng = np.random.default_rng(seed)
    scale = np.ones(64) if data == "iid" else rng.lognormal(0, 1, 64)
    layer = np.repeat(scale, -(-size // 64))[:size].astype(np.float32)
    return [jnp.asarray(rng.standard_t(5, size).astype(np.float32) * layer) for _ in range(4)]


def mapped(function, mesh, specs, *others):
    """A function of the first argument, the state and others over one device, state donated."""
    given, made = (P(), specs, *others), (P(), specs)
    whole = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
    return jax.jit(whole, donate_argnums=(0, 1) if others else 1)


class Stepper:
    """Takes the steps of a transformation on gradients in turn, into its steady state at first."""

    def __init__(self, tx, stream):
        mesh = one_device_mesh()
        self.state = optax_ext.init_state(tx, stream[0], mesh)
        self._step = mapped(tx.update, mesh, optax_ext.state_specs(self.state))
        self._stream = stream
        # Residuals as large as they get, pages touched.
        for turn in range(12):
            jax.block_until_ready(self(turn))
        self._traces = self._step._cache_size()

    def __call__(self, turn):
        """Takes a step; its updates and its state, which are to be waited for."""
        updates, self.state = self._step(self._stream[turn % len(self._stream)], self.state)
        return updates, self.state

    def check(self, name):
        """Raises an error where a step was compiled again."""
        assert self._step._cache_size() == self._traces, f"{name} was compiled again"


def measure_time(size, density, data, rounds, seed):
    """One row for each contestant."""
    k = max(1, round(density * size))
    stream = gradient_stream(size, data, seed)
    # Both results whole: with a part of them XLA sorts all n, 15 times slower.
    top_k = jax.jit(lambda acc: jax.lax.top_k(jnp.abs(acc), k))
    nonzero = jax.jit(lambda acc, t: jnp.nonzero(jnp.abs(acc) >= t, size=k, fill_value=size))
    steps = {name: Stepper(tx, stream) for name, tx in transformations(density).items()}
    acc = stream[0] + steps["ok_topk"].state.residual[0]
    threshold = top_k(acc)[0][-1]
    jax.block_until_ready(nonzero(acc, threshold))
    runs = {
        BASE: lambda turn: top_k(acc),
        "jnp.nonzero(abs(acc) >= t, size=k) alone": lambda turn: nonzero(acc, threshold),
        **steps,
    }
    deviation = {name: [] for name in runs}

    def count(name, result):
        del result
        state = optax_ext.get_state(steps[name].state) if name in steps else None
        if state is not None:
            deviation[name].append(abs(int(state.info.selected[0]) - k) / k)

    times = timing.in_turns(runs, rounds, seen=count)
    for name, step in steps.items():
        step.check(name)
    return [
        row | {"mean_deviation_of_k": float(np.mean(deviation[row["contestant"]] or [0.0]))}
        for row in timing.ratios(times, BASE)
    ]


def measure_memory(size, density, leaves):
    """Peak bytes of a training step over dense, in units of n float32."""
    cuts = [size * i // leaves for i in range(leaves + 1)]
    params = [
        jax.ShapeDtypeStruct((b - a,), jnp.float32) for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    params = params[0] if leaves == 1 else params
    mesh, batch = one_device_mesh(), jax.ShapeDtypeStruct((1,), jnp.float32)

    def loss(params, batch):
        return sum(jnp.vdot(p, p) * batch[0] for p in jax.tree.leaves(params))

    def peak(tx):
        state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, mesh), params)

        def local(params, state, batch):
            updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        step = mapped(local, mesh, optax_ext.state_specs(state), P())
        memory = step.lower(params, state, batch).compile().memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes

    txs = transformations(density).items()
    peaks = {name: peak(optax.chain(tx, optax.sgd(0.1))) for name, tx in txs}
    return {name: (found - peaks[DENSE]) / (4 * size) for name, found in peaks.items()}


@options.program
def main(argv=None):
    """Prints the tables."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=options.at_least_one, default=14_728_266, help="n (VGG-16)")
    add("--density", type=options.share, default=0.01)
    add("--data", choices=("iid", "layers"), default="iid")
    add("--rounds", type=options.at_least_one, default=33, help="at least 33: a whole period")
    add("--leaves", type=options.several, default=32, help="of the second memory column")
    add("--seed", type=int, default=0)
    options.add_outputs(parser)
    args = parser.parse_args(argv)
    rows = measure_time(args.size, args.density, args.data, args.rounds, args.seed)
    show(
        f"n = {args.size}, density = {args.density}, {args.data}, {jax.default_backend()}, "
        f"{args.rounds} rounds; ratio to {BASE}",
        [*timing.CELLS, "|sel-k|/k"],
        [[*timing.cells(row), f"{row['mean_deviation_of_k']:.2%}"] for row in rows],
    )
    given = args.size, args.density
    memory = {"one leaf": measure_memory(*given, 1)}
    memory[f"{args.leaves} leaves"] = measure_memory(*given, args.leaves)
    show(
        "peak memory of a training step over dense, in n-sized float32 buffers",
        ["contestant", *memory],
        [[name, *(f"{of[name]:.2f}" for of in memory.values())] for name in NAMES],
    )
    settings = {key: getattr(args, key) for key in ("size", "density", "data", "rounds")}
    found = {"backend": jax.default_backend(), "times": rows, "memory_over_dense": memory}
    reports.write(args.json, settings | found)


if __name__ == "__main__":
    sys.exit(main())
