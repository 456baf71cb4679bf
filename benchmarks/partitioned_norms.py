"""What partitioned norms save, beside `optax.lamb` and `optax.lars` in the same run.

    python benchmarks/partitioned_norms.py [--layers 50] [--width 512] [--rounds 15] [--json FILE]

One worker's step, on one device: the optimizer with donated state and parameters,
where the number of the worker is an argument, P is set by hand and the allreduce of
the norms is left out (its sum is replaced by P times the worker's part). Contestants
take turns in each round, in an order that changes, and each time is divided by that
of optax in the same round: the table gives the median and the quartiles. "no norms"
is the optimizer with ratio 1, the most that any such scheme can reach. "norms" is
the computation of the norms alone. The allreduce is timed by itself, over the
devices that there are.

The model: `layers` matrices of width x width, a quarter of them four times as wide,
each with a bias.
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

from optax_ext._transforms import _partitioned_norms as norms


def model(layers, width, seed):
    """Parameters as a list of matrices and biases."""
    rng = np.random.default_rng(seed)
    params = []
    for i in range(layers):
        shape = (width, width * (4 if i % 4 == 3 else 1))
        params += [rng.standard_normal(shape).astype(np.float32), np.ones(shape[1], np.float32)]
    return params


def trust_ratio(workers, coefficient=1.0):
    """The transformation of one of `workers`, without the allreduce; its number is the state."""

    def update(updates, worker, params):
        leaves, treedef = jax.tree.flatten(updates)
        partial, whole = norms.partial_squares(
            [*treedef.flatten_up_to(params), *leaves], worker, workers
        )
        squares = jnp.stack(
            [w if p is None else w + workers * p for p, w in zip(partial, whole, strict=True)]
        )
        ratios = norms.trust_ratios(squares, 0.0, coefficient, 0.0)
        return jax.tree.unflatten(treedef, [u * r for u, r in zip(leaves, ratios)]), worker

    return optax.GradientTransformation(lambda _: jnp.int32(workers // 2), update)


def lamb(ratio):
    """The parts of `optax.lamb` around a trust ratio."""
    return optax.chain(
        optax.scale_by_adam(eps=1e-6),
        optax.add_decayed_weights(0.01),
        ratio,
        optax.scale_by_learning_rate(1e-3),
    )


def lars(ratio):
    """The parts of `optax.lars` around a trust ratio."""
    return optax.chain(
        optax.add_decayed_weights(1e-4),
        ratio,
        optax.scale_by_learning_rate(1e-3),
        optax.trace(decay=0.9),
    )


def only(ratio):
    """The trust ratio alone."""
    return ratio


OPTIMIZERS = {
    "lamb": (lamb, lambda: optax.lamb(1e-3, weight_decay=0.01)),
    "lars": (lars, lambda: optax.lars(1e-3, weight_decay=1e-4, trust_coefficient=1.0)),
    "trust ratio alone": (only, optax.scale_by_trust_ratio),
}


def optimizer_step(tx):
    """`(params, state, gradients) -> (params, state)`, in place."""

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def norms_alone(workers):
    """The sums of squares of parameters and gradients that one worker computes."""

    def sums(params, state, gradients):
        partial, whole = norms.partial_squares([*params, *gradients], state, workers)
        return params, state, [x for x in (*partial, *whole) if x is not None]

    step = jax.jit(sums, donate_argnums=(0, 1))
    return lambda *args: step(*args)[:2]


def contestants(name, worker_counts):
    """Steps and initial states by contestant; the first is what the others are compared with."""
    if name == "norms":
        return {
            f"P = {p}": (norms_alone(p), lambda params, p=p: jnp.int32(p // 2))
            for p in (1, *worker_counts)
        }
    around, plain = OPTIMIZERS[name]
    txs = {"optax": plain()}
    txs.update({f"P = {p}": around(trust_ratio(p)) for p in worker_counts})
    txs["no norms"] = around(optax.identity())
    return {key: (optimizer_step(tx), tx.init) for key, tx in txs.items()}


def measure(name, params, gradients, worker_counts, rounds):
    """One row for each contestant."""
    runs = {}
    for key, (step, init) in contestants(name, worker_counts).items():
        own = jax.tree.map(jnp.array, params)
        runs[key] = [step, (own, init(own))]
    times = {key: [] for key in runs}
    order = list(runs)
    for i in range(rounds + 2):
        for key in order[i % len(order) :] + order[: i % len(order)]:
            step, carry = runs[key]
            start = time.perf_counter()
            runs[key][1] = jax.block_until_ready(step(*carry, gradients))
            if i >= 2:  # the first two compile and touch the pages
                times[key].append(time.perf_counter() - start)
    base = times[order[0]]
    rows = []
    for key in order:
        low, ratio, high = np.percentile(np.divide(times[key], base), (25, 50, 75))
        rows.append(
            {
                "optimizer": name,
                "contestant": key,
                "median_ms": statistics.median(times[key]) * 1e3,
                "ratio": float(ratio),
                "ratio_quartiles": [float(low), float(high)],
            }
        )
    return rows


def measure_allreduce(count, rounds):
    """Median milliseconds of a psum of `count` numbers over all devices, and their number."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("workers",), axis_types=(AxisType.Auto,))
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x[0], "workers"),
            mesh=mesh,
            in_specs=P("workers"),
            out_specs=P(),
        )
    )
    x = jax.device_put(jnp.ones((devices, count)), jax.sharding.NamedSharding(mesh, P("workers")))
    jax.block_until_ready(total(x))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(total(x))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3, devices


def main(argv=None) -> int:
    """Measures, prints the tables, and writes them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    params = model(args.layers, args.width, args.seed)
    gradients = [jnp.asarray(0.01 * p) for p in model(args.layers, args.width, args.seed + 1)]
    size = sum(p.size for p in params)
    print(f"n = {size}, {len(params)} leaves, {jax.default_backend()}, {args.rounds} rounds")
    print(f"{'optimizer':20} {'contestant':12} {'ratio':>7} {'quartiles':>15} {'ms':>9}")
    rows = []
    for name in (*OPTIMIZERS, "norms"):
        rows += measure(name, params, gradients, args.workers, args.rounds)
        for row in [row for row in rows if row["optimizer"] == name]:
            low, high = row["ratio_quartiles"]
            print(
                f"{row['optimizer']:20} {row['contestant']:12} {row['ratio']:7.3f} "
                f"{f'{low:.3f} - {high:.3f}':>15} {row['median_ms']:9.2f}"
            )
    shared = 2 * sum(p.size >= norms.SMALL for p in params)
    milliseconds, devices = measure_allreduce(shared, args.rounds)
    print(f"allreduce of {shared} numbers over {devices} devices here: {milliseconds:.3f} ms")
    if args.json:
        report = {"size": size, "backend": jax.default_backend(), "times": rows}
        report["allreduce"] = {"numbers": shared, "devices": devices, "ms": milliseconds}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
