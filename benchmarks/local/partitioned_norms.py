"""The savings of partitioned norms, compared with `optax.lamb` and `optax.lars` in the same run.

    python -m benchmarks.local.partitioned_norms [--layers 50] [--width 512] [--json FILE]

One worker's step, on one device: the optimizer with donated state and parameters. The number of the
worker is an argument, P is set by hand, and the allreduce of the norms is left out (its sum is
replaced by P times the worker's part). Contestants take turns, and each time is divided by optax's
time in the same round. "no norms" is the optimizer with ratio 1, the upper limit of any such
scheme. The model: matrices of width x width, a quarter of them four times as wide, with biases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext.contrib import _trust_ratio as norms

from .._common import options, reports, timing
from .._common.display import show_rows


def model(layers, width, seed):
    """Parameters as a list of matrices and biases."""
    rng = np.random.default_rng(seed)
    params = []
    for i in range(layers):
        shape = (width, width * (4 if i % 4 == 3 else 1))
        params += [rng.standard_normal(shape).astype(np.float32), np.ones(shape[1], np.float32)]
    return params


def trust_ratio(workers):
    """The transformation of one of `workers`, without the allreduce; its number is the state."""

    def update(updates, worker, params):
        leaves, treedef = jax.tree.flatten(updates)
        both = [*treedef.flatten_up_to(params), *leaves]
        pairs = zip(*norms.partial_squares(both, worker, workers), strict=True)
        squares = jnp.stack([w if p is None else w + workers * p for p, w in pairs]).reshape(2, -1)
        ratios = norms.trust_ratios(squares, 0.0, 1.0, 0.0)
        return jax.tree.unflatten(treedef, [u * r for u, r in zip(leaves, ratios)]), worker

    return optax.GradientTransformation(lambda _: jnp.int32(workers // 2), update)


def lamb(ratio):
    """LAMB around a trust ratio."""
    before = optax.scale_by_adam(eps=1e-6), optax.add_decayed_weights(0.01)
    return optax.chain(*before, ratio, optax.scale_by_learning_rate(1e-3))


def lars(ratio):
    """LARS around a trust ratio."""
    after = optax.scale_by_learning_rate(1e-3), optax.trace(decay=0.9)
    return optax.chain(optax.add_decayed_weights(1e-4), ratio, *after)


OPTIMIZERS = {
    "lamb": (lamb, optax.lamb(1e-3, weight_decay=0.01)),
    "lars": (lars, optax.lars(1e-3, weight_decay=1e-4, trust_coefficient=1.0)),
}


def measure(name, params, gradients, worker_counts, rounds):
    """One row for each contestant; the others are compared with the first."""
    around, plain = OPTIMIZERS[name]
    txs = {"optax": plain} | {f"P = {p}": around(trust_ratio(p)) for p in worker_counts}
    txs["no norms"] = around(optax.identity())
    runs = {key: _stepper(tx, params, gradients) for key, tx in txs.items()}
    return [row | {"of": name} for row in timing.ratios(timing.in_turns(runs, rounds), "optax")]


def _stepper(tx, params, gradients):
    @jax.jit(donate_argnums=1)
    def step(gradients, carry):
        params, state = carry
        updates, state = tx.update(gradients, state, params)
        return None, (optax.apply_updates(params, updates), state)

    own = jax.tree.map(jnp.array, params)
    return timing.steady(step, (own, tx.init(own)), [gradients], before=2)


@options.program
def main(argv=None):
    """Measures, prints the tables, and writes them as JSON if asked to."""
    parser = options.parser_of(__doc__, "json", layers=50, width=512, rounds=15, seed=0)
    at_least_one, counts = options.at_least_one, [1, 8, 64]
    parser.add_argument("--workers", type=at_least_one, nargs="+", default=counts)
    args = parser.parse_args(argv)
    params = model(args.layers, args.width, args.seed)
    gradients = [jnp.asarray(0.01 * p) for p in model(args.layers, args.width, args.seed + 1)]
    size = sum(p.size for p in params)
    print(f"n = {size}, {len(params)} leaves, {jax.default_backend()}, {args.rounds} rounds")
    rows = []
    for name in OPTIMIZERS:
        found = measure(name, params, gradients, args.workers, args.rounds)
        show_rows(name, found)
        rows += found
    reports.write(args.json, {"size": size, "backend": jax.default_backend(), "times": rows})


if __name__ == "__main__":
    raise SystemExit(main())
