"""The cost of a step of the transformation on one worker, compared with `lax.top_k` alone.

    python -m benchmarks.local.step_cost [--size 14728266] [--density 0.01] [--json FILE]

All contestants take turns in one process, and each time is divided by the time of
`lax.top_k(abs(acc), k)` in the same round: median and quartiles. A step is the whole `update`: the
check for non-finite values, error feedback, selection, the allreduce of one worker, the new
residual and the dense update. `acc` is the accumulator of such a step.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext

from .._common import options, reports, timing
from .._common.contestants import find
from .._common.display import show_rows
from . import select_speed

AXIS = "workers"
# Contestants that only select, by their names in `select_speed`.
ALONE = {
    "lax.top_k(abs(acc), k) alone": select_speed.BASE,
    "jnp.nonzero(abs(acc) >= t, size=k) alone": "jnp.nonzero(size=k)",
}
BASE = next(iter(ALONE))
NAMES = {
    "dense (psum)": "dense/leaves",
    "ok_topk": "ok_topk",
    "ok_topk, threshold_reuse": "ok_topk/reuse",
}


def stepper(tx, stream):
    """A compiled step of a transformation, and a run of it with residuals of their usual size."""
    axes = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:1]}
    mesh = jax.make_mesh((1,), (AXIS,), **axes)
    state = optax_ext.init_state(tx, stream[0], mesh)
    both = (P(), optax_ext.state_specs(state))
    mapped = jax.shard_map(tx.update, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
    step = jax.jit(mapped, donate_argnums=1)
    return step, timing.steady(step, state, stream, before=12)


def measure(size, density, rounds, seed):
    """One row for each contestant, on four heavy-tailed gradients."""
    rng = np.random.default_rng(seed)
    stream = [jnp.asarray(rng.standard_t(5, size), jnp.float32) for _ in range(4)]
    txs = {name: find(contestant).make(density, AXIS) for name, contestant in NAMES.items()}
    steps = {name: stepper(tx, stream) for name, tx in txs.items()}
    _, state = steps["ok_topk"][1](0)
    acc = np.asarray(stream[0] + state.residual[0])
    del state
    compiled = {name: step._cache_size() for name, (step, _) in steps.items()}
    outside = select_speed.outside(density, max(1, round(density * size)), acc)
    alone = {name: outside[key] for name, key in ALONE.items()}
    for run in alone.values():
        jax.block_until_ready(run())
    runs = {name: lambda turn, run=run: run() for name, run in alone.items()}
    runs |= {name: run for name, (_, run) in steps.items()}
    times = timing.in_turns(runs, rounds)
    for name, (step, _) in steps.items():
        assert step._cache_size() == compiled[name], f"{name} was compiled again"
    return timing.ratios(times, BASE)


@options.program
def main(argv=None):
    """Prints the table."""
    usual = {"size": (14_728_266, "n (VGG-16)"), "density": 0.01, "seed": 0}
    usual |= {"rounds": (33, "at least 33: a whole period")}
    args = options.parser_of(__doc__, "json", **usual).parse_args(argv)
    rows = measure(args.size, args.density, args.rounds, args.seed)
    title = f"n = {args.size}, density = {args.density}, {jax.default_backend()}"
    title = f"{title}, {args.rounds} rounds; ratio to {BASE}"
    show_rows(title, rows)
    settings = {key: getattr(args, key) for key in ("size", "density", "rounds")}
    reports.write(args.json, settings | {"backend": jax.default_backend(), "times": rows})


if __name__ == "__main__":
    raise SystemExit(main())
