"""How long the first step takes: tracing and compiling, beside the dense step.

    python -m benchmarks.local.compile_time [--size 1e6 14.7e6] [--workers 8] [--json FILE]

What is compiled is the whole `update` on a mesh of CPU devices, from nothing in each round: without
a cache, and with functions that were not traced before. The contestants take turns, and a ratio is
one of the same round.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext

from .._common import options, reports, timing
from .._common.display import show

AXIS, DENSE = "workers", "dense, AdamW"
RATE, DENSITY = 1e-3, 0.01


def contestants() -> dict[str, Callable[[], optax.GradientTransformation]]:
    """What makes each of them, by name."""
    return {
        DENSE: lambda: optax.chain(optax_ext.dense(axis=AXIS), optax.adamw(RATE)),
        "sparse_adamw": lambda: optax_ext.sparse_adamw(RATE, axis=AXIS),
        "sparse_sgd": lambda: optax_ext.sparse_sgd(RATE, axis=AXIS),
        "ok_topk_sgd": lambda: optax_ext.ok_topk_sgd(RATE, density=DENSITY, axis=AXIS),
    }


def compile_update(make: Callable[[], optax.GradientTransformation], size: int, workers: int):
    """The compiled update of all workers."""
    tx = make()
    mesh = jax.make_mesh((workers,), (AXIS,), axis_types=(AxisType.Auto,))
    params = jax.ShapeDtypeStruct((size,), jnp.float32)
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, {AXIS: workers}), params)
    specs = optax_ext.state_specs(state)

    def update(gradient: jax.Array, state: Any, params: jax.Array) -> Any:
        return tx.update(gradient[0], state, params)

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(P(AXIS), specs, P()), out_specs=(P(), specs)
    )
    given = jax.ShapeDtypeStruct((workers, size), jnp.float32)
    return jax.jit(mapped, donate_argnums=1).lower(given, state, params).compile()


@options.program
def main(argv: list[str] | None = None) -> int:
    """Compiles, and prints the table."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=options.at_least_one, nargs="+", default=[1_000_000, 14_700_000], help="n")
    add("--workers", type=options.at_least_one, default=8)
    add("--rounds", type=options.at_least_one, default=3)
    add("--json", type=options.output, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_num_cpu_devices", args.workers)
    rows = []
    for size in args.size:

        def run(make: Any, size: int = size) -> Callable[[int], None]:
            def compile_anew(_turn: int) -> None:
                # Or what was traced in the last round would be known.
                jax.clear_caches()
                compile_update(make, size, args.workers)

            return compile_anew

        times = timing.in_turns(
            {name: run(make) for name, make in contestants().items()}, args.rounds
        )
        for row in timing.ratios(times, DENSE):
            low, middle, high = timing.quartiles(times[row["contestant"]])
            rows.append({"size": size, **row, "seconds": [low, middle, high]})
    show(
        f"{args.workers} workers on this machine, {args.rounds} rounds",
        ("contestant", "n", "seconds", "quartiles", "times dense"),
        [
            [
                row["contestant"],
                f"{row['size']:,}",
                f"{row['seconds'][1]:.1f}",
                f"{row['seconds'][0]:.1f} to {row['seconds'][2]:.1f}",
                f"{row['ratio']:.1f}",
            ]
            for row in rows
        ],
    )
    reports.write(
        args.json,
        {"jax": jax.__version__, "workers": args.workers, "rounds": args.rounds, "rows": rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
