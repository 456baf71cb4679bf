"""What a step of the transformation costs on one worker, beside `lax.top_k` alone.

    python benchmarks/step_cost.py [--size 14728266] [--density 0.01] [--json FILE]

All contestants run in one process, one after the other in each round, and each
time is divided by that of `lax.top_k(abs(acc), k)` in the same round: the table
gives the median ratio and its quartiles. A step is the whole `update`: the check
for non-finite values, error feedback, selection, the allreduce of one worker,
the new residual and the dense update. `acc` is the accumulator of such a step.

The memory of a training step is read from the compiled programs, for a flat
gradient and for one of the given number of leaves, beside that of the dense
transformation.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc

AXIS = "workers"


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
    state = optax_ext.init_state(tx, gradient, mesh, AXIS)
    specs = optax_ext.state_specs(state, AXIS)
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


def timed(function, *args):
    """Seconds until the result is there, and the result."""
    start = time.perf_counter()
    out = jax.block_until_ready(function(*args))
    return time.perf_counter() - start, out


def measure_time(size, density, data, rounds, seed):
    """One row for each contestant."""
    k = max(1, round(density * size))
    stream = gradient_stream(size, data, seed)
    top_k, nonzero = baselines(k)
    steps = {name: update_step(tx, stream[0]) for name, tx in transformations(density).items()}
    # Into the steady state: residuals as large as they get, pages touched.
    for name, (step, state) in steps.items():
        for i in range(12):
            updates, state = step(stream[i % 4], state)
            del updates
        steps[name] = (step, state)
    acc = stream[0] + steps["ok_topk"][1].residual[0]
    threshold = top_k(acc)[0][-1]
    jax.block_until_ready(nonzero(acc, threshold))
    traces = {name: step._cache_size() for name, (step, _) in steps.items()}

    times = {"lax.top_k(abs(acc), k) alone": []}
    times |= {"jnp.nonzero(abs(acc) >= t, size=k) alone": []}
    times |= {name: [] for name in steps}
    deviation = {}
    for i in range(rounds):
        gradient = stream[i % 4]
        names = list(times)
        times[names[0]].append(timed(top_k, acc)[0])
        times[names[1]].append(timed(nonzero, acc, threshold)[0])
        for name in steps:
            step, state = steps[name]
            seconds, (updates, state) = timed(step, gradient, state)
            del updates
            steps[name] = (step, state)
            times[name].append(seconds)
            info = optax_ext.get_info(state)
            if info is not None:
                off = abs(int(info.selected[0]) - k) / k
                deviation.setdefault(name, []).append(off)
    for name, (step, _) in steps.items():
        assert step._cache_size() == traces[name], f"{name} was compiled again"
    base = times["lax.top_k(abs(acc), k) alone"]
    rows = []
    for name, seconds in times.items():
        ratios = sorted(s / b for s, b in zip(seconds, base, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "contestant": name,
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "median_ms": 1e3 * statistics.median(seconds),
                "mean_deviation_of_k": float(np.mean(deviation.get(name, [0.0]))),
            }
        )
    return rows


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

        state = jax.eval_shape(lambda p, tx=tx: optax_ext.init_state(tx, p, mesh, AXIS), params)
        specs = optax_ext.state_specs(state, AXIS)

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


def main(argv=None):
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=14_728_266, help="n (VGG-16)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--data", choices=("iid", "layers"), default="iid")
    parser.add_argument("--rounds", type=int, default=33, help="at least 33: a whole period")
    parser.add_argument("--leaves", type=int, default=32, help="of the second memory column")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    size = int(args.size)
    rows = measure_time(size, args.density, args.data, args.rounds, args.seed)
    flat = measure_memory(size, args.density, 1)
    tree = measure_memory(size, args.density, args.leaves)
    print(
        f"n = {size}, density = {args.density}, {args.data}, {jax.default_backend()}, "
        f"{args.rounds} rounds"
    )
    print(f"{'contestant':42} {'/ top_k':>8} {'quartiles':>15} {'ms':>8} {'|sel-k|/k':>10}")
    for row in rows:
        low, high = row["ratio_quartiles"]
        quartiles = f"{low:.3f} - {high:.3f}"
        print(
            f"{row['contestant']:42} {row['ratio']:8.3f} {quartiles:>15} {row['median_ms']:8.1f} "
            f"{row['mean_deviation_of_k']:10.2%}"
        )
    print("\npeak memory of a training step over dense, in n-sized float32 buffers")
    print(f"{'':42} {'one leaf':>10} {args.leaves:>7} leaves")
    for name in flat:
        print(f"{name:42} {flat[name]:10.2f} {tree[name]:14.2f}")
    if args.json:
        report = {
            "size": size,
            "density": args.density,
            "data": args.data,
            "rounds": args.rounds,
            "backend": jax.default_backend(),
            "times": rows,
            "memory_over_dense": {"one leaf": flat, f"{args.leaves} leaves": tree},
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
