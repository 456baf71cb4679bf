"""What the state of each option takes, in bytes per parameter and worker.

    python -m benchmarks.local.state_memory [--layers 16] [--width 512] [--json FILE]

The state is made on a mesh and its arrays on one device are added up; beside it what the compiled
step needs besides its arguments and results. Nothing is timed, and no step is run.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import optax_ext
import sparse_collectives as sc

from .._common import options, reports

NODES, DEVICES = 2, 4


def contestants(density: float):
    """Name, axis, transformation; a training with SGD follows unless another is said."""
    both, one = ("node", "device"), "w"
    momentum = optax_ext.momentum_correction(0.9)

    def ok_topk(**more):
        return optax_ext.ok_topk(density, axis=one, **more)

    return [
        ("dense", one, optax_ext.dense(axis=one)),
        ("dense, adam behind it", one, optax.chain(optax_ext.dense(axis=one), optax.adam(1e-3))),
        ("sparse_adamw", one, optax_ext.sparse_adamw(1e-3, axis=one)),
        ("sparse_sgd", one, optax_ext.sparse_sgd(1e-2, axis=one)),
        ("ok_topk_sgd", one, optax_ext.ok_topk_sgd(1e-2, density=density, axis=one)),
        ("powersgd, rank 4", one, optax_ext.powersgd(4, axis=one)),
        ("ok_topk", one, ok_topk()),
        ("ok_topk, residual in bfloat16", one, ok_topk(residual=optax_ext.residual(jnp.bfloat16))),
        ("ok_topk, small leaves dense", one, ok_topk(dense_leaves=optax_ext.small_leaves())),
        ("ok_topk, momentum correction", one, ok_topk(correction=momentum)),
        ("ok_topk, nonfinite='drop'", one, ok_topk(nonfinite="drop")),
        ("ok_topk, xi every 100 steps", one, optax_ext.measure_xi(ok_topk(), axis=one, every=100)),
        ("ok_topk, 100 dense steps first", one, ok_topk(dense_steps=100)),
        ("ok_topk, 4 buckets", one, optax_ext.bucketed(ok_topk(), 4)),
        (
            "ok_topk, threshold_reuse",
            one,
            ok_topk(selector=sc.select.threshold_reuse(density=density)),
        ),
        ("topk_a", one, optax_ext.topk_a(density, axis=one)),
        ("gtopk", one, optax_ext.gtopk(density, axis=one)),
        ("topk_dsa", one, optax_ext.topk_dsa(density, axis=one)),
        (
            "topk_a, adtopk",
            one,
            optax_ext.topk_a(density, axis=one, selector=sc.select.adtopk(density=density)),
        ),
        (
            f"hitopk, nodes of {DEVICES}",
            both,
            optax_ext.hitopk(density, axis=both, inner_axis="device"),
        ),
    ]


def measure(name: str, axis, tx, layers: int, width: int) -> dict:
    """Bytes per parameter of the state, and of the step's temporaries."""
    shape = (NODES, DEVICES) if isinstance(axis, tuple) else (NODES * DEVICES,)
    names = axis if isinstance(axis, tuple) else (axis,)
    types = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, names, axis_types=types)
    params = {
        f"layer_{i}": {"kernel": jnp.zeros((width, width)), "bias": jnp.zeros(width)}
        for i in range(layers)
    }
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = optax_ext.init_state(tx, params, mesh)
    of_worker = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    whole, specs = jax.P(), optax_ext.state_specs(state)
    step = jax.jit(
        jax.shard_map(
            tx.update,
            mesh=mesh,
            in_specs=(whole, specs, whole),
            out_specs=(whole, specs),
            # The gradients are a stand-in: the same on every worker.
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )
    temporary = step.lower(params, state, params).compile().memory_analysis().temp_size_in_bytes
    return {"option": name, "n": size, "state": of_worker / size, "temporary": temporary / size}


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = options.parser_of(__doc__)
    parser.add_argument("--layers", type=options.at_least_one, default=16)
    parser.add_argument("--width", type=options.at_least_one, default=512)
    parser.add_argument("--density", type=options.share, default=0.01)
    options.add_outputs(parser)
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", NODES * DEVICES)
    print(f"{NODES * DEVICES} workers, {args.layers} layers, density {args.density:g}")
    print("| option | state, bytes per parameter | temporary, bytes per parameter |\n|---|---|---|")
    rows = []
    for name, axis, tx in contestants(args.density):
        rows.append(measure(name, axis, tx, args.layers, args.width))
        row = rows[-1]
        print(f"| {name} | {row['state']:.2f} | {row['temporary']:.1f} |", flush=True)
    reports.write(args.json, rows)


if __name__ == "__main__":
    sys.exit(main())
