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
import sparse_collectives as sc

from .._common import options, reports, timing
from .._common.display import show

AXIS = "workers"
BASE = "lax.top_k(abs(acc), k) alone"


def transformations(density):
    """The contestants that are gradient transformations, by name."""
    reuse = sc.select.threshold_reuse(density=density)
    return {
        "dense (psum)": optax_ext.dense(axis=AXIS),
        "ok_topk": optax_ext.ok_topk(density=density, axis=AXIS),
        "ok_topk, threshold_reuse": optax_ext.ok_topk(density=density, axis=AXIS, selector=reuse),
    }


def one_device_mesh():
    """A mesh of the first device."""
    return jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


def gradient_stream(size, data, seed):
    """Four heavy-tailed gradients, by option of a scale that differs by layer."""
    rng = np.random.default_rng(seed)
    scale = np.ones(64) if data == "iid" else rng.lognormal(0, 1, 64)
    layer = np.repeat(scale, -(-size // 64))[:size].astype(np.float32)
    return [jnp.asarray(rng.standard_t(5, size).astype(np.float32) * layer) for _ in range(4)]


def update_step(tx, gradient):
    """A compiled `update` with a donated state, and the state."""
    mesh = one_device_mesh()
    state = optax_ext.init_state(tx, gradient, mesh)
    specs = optax_ext.state_specs(state)
    step = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False
    )
    return jax.jit(step, donate_argnums=1), state


def baselines(k):
    """Selection alone, as a JAX user has it."""

    def top_k(acc):
        # Both results whole: with a part of them XLA sorts all n, 15 times slower.
        return jax.lax.top_k(jnp.abs(acc), k)

    def nonzero(acc, threshold):
        return jnp.nonzero(jnp.abs(acc) >= threshold, size=k, fill_value=acc.shape[0])

    return jax.jit(top_k), jax.jit(nonzero)


class Stepper:
    """Takes the steps of a transformation on gradients in turn, into its steady state at first."""

    def __init__(self, tx, stream):
        self._step, self.state = update_step(tx, stream[0])
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
    top_k, nonzero = baselines(k)
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
    mesh = one_device_mesh()
    peaks = {}
    for name, tx in transformations(density).items():
        tx = optax.chain(tx, optax.sgd(0.1))

        def loss(params, batch):
            return sum(jnp.vdot(p, p) * batch[0] for p in jax.tree.leaves(params))

        state = jax.eval_shape(lambda p, tx=tx: optax_ext.init_state(tx, p, mesh), params)
        specs = optax_ext.state_specs(state)

        def local(params, state, batch, tx=tx, loss=loss):
            gradients = jax.grad(loss)(params, batch)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.shard_map(
            local, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs), check_vma=False
        )
        batch = jax.ShapeDtypeStruct((1,), jnp.float32)
        memory = (
            jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
        ).memory_analysis()
        peaks[name] = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
    dense = peaks["dense (psum)"]
    return {name: (peak - dense) / (4 * size) for name, peak in peaks.items()}


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
    memory = {
        "one leaf": measure_memory(args.size, args.density, 1),
        f"{args.leaves} leaves": measure_memory(args.size, args.density, args.leaves),
    }
    show(
        "peak memory of a training step over dense, in n-sized float32 buffers",
        ["contestant", *memory],
        [[name, *(f"{of[name]:.2f}" for of in memory.values())] for name in memory["one leaf"]],
    )
    settings = {key: getattr(args, key) for key in ("size", "density", "data", "rounds")}
    found = {"backend": jax.default_backend(), "times": rows, "memory_over_dense": memory}
    reports.write(args.json, settings | found)


if __name__ == "__main__":
    sys.exit(main())
