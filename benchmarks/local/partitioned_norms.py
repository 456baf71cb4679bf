"""What partitioned norms save, beside `optax.lamb` and `optax.lars` in the same run.

    python -m benchmarks.local.partitioned_norms [--layers 50] [--width 512] [--json FILE]

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

import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from optax_ext.contrib import _partitioned_norms as norms

from .._common import options, reports, timing
from .._common.display import show


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


def parts_of(*before, rate=1e-3, after=()):
    """An optimizer of optax around a trust ratio."""
    return lambda ratio: optax.chain(*before, ratio, optax.scale_by_learning_rate(rate), *after)


OPTIMIZERS = {
    "lamb": (
        parts_of(optax.scale_by_adam(eps=1e-6), optax.add_decayed_weights(0.01)),
        lambda: optax.lamb(1e-3, weight_decay=0.01),
    ),
    "lars": (
        parts_of(optax.add_decayed_weights(1e-4), after=[optax.trace(decay=0.9)]),
        lambda: optax.lars(1e-3, weight_decay=1e-4, trust_coefficient=1.0),
    ),
    "trust ratio alone": (lambda ratio: ratio, optax.scale_by_trust_ratio),
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
    txs |= {f"P = {p}": around(trust_ratio(p)) for p in worker_counts}
    txs["no norms"] = around(optax.identity())
    return {key: (optimizer_step(tx), tx.init) for key, tx in txs.items()}


def measure(name, params, gradients, worker_counts, rounds):
    """One row for each contestant."""
    found = contestants(name, worker_counts)
    runs = {key: _stepper(*made, params, gradients) for key, made in found.items()}
    times = timing.in_turns(runs, rounds)
    return [row | {"optimizer": name} for row in timing.ratios(times, next(iter(runs)))]


def _stepper(step, init, params, gradients):
    own = jax.tree.map(jnp.array, params)
    carry = (own, init(own))

    def run(turn):
        nonlocal carry
        del turn
        carry = step(*carry, gradients)
        return carry

    for turn in range(2):  # compile, and touch the pages
        jax.block_until_ready(run(turn))
    return run


def measure_allreduce(count, rounds):
    """Median milliseconds of a psum of `count` numbers over all devices, and their number."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("workers",), axis_types=(AxisType.Auto,))

    def summed(x):
        return jax.lax.psum(x[0], "workers")

    total = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P("workers"), out_specs=P()))
    x = jax.device_put(jnp.ones((devices, count)), jax.sharding.NamedSharding(mesh, P("workers")))
    jax.block_until_ready(total(x))
    times = [timing.seconds_of(total, x)[0] for _ in range(rounds)]
    return statistics.median(times) * 1e3, devices


@options.program
def main(argv=None):
    """Measures, prints the tables, and writes them as JSON if asked to."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--layers", type=options.at_least_one, default=50)
    add("--width", type=options.at_least_one, default=512)
    add("--workers", type=options.at_least_one, nargs="+", default=[1, 8, 64])
    add("--rounds", type=options.at_least_one, default=15)
    add("--seed", type=int, default=0)
    options.add_outputs(parser)
    args = parser.parse_args(argv)
    params = model(args.layers, args.width, args.seed)
    gradients = [jnp.asarray(0.01 * p) for p in model(args.layers, args.width, args.seed + 1)]
    size = sum(p.size for p in params)
    print(f"n = {size}, {len(params)} leaves, {jax.default_backend()}, {args.rounds} rounds")
    rows = []
    for name in (*OPTIMIZERS, "norms"):
        found = measure(name, params, gradients, args.workers, args.rounds)
        show(name, timing.CELLS, [timing.cells(row) for row in found])
        rows += [{"of": name} | row for row in found]
    shared = 2 * sum(p.size >= norms.SMALL for p in params)
    milliseconds, devices = measure_allreduce(shared, args.rounds)
    print(f"allreduce of {shared} numbers over {devices} devices here: {milliseconds:.3f} ms")
    report = {"size": size, "backend": jax.default_backend(), "times": rows}
    report["allreduce"] = {"numbers": shared, "devices": devices, "ms": milliseconds}
    reports.write(args.json, report)


if __name__ == "__main__":
    sys.exit(main())
