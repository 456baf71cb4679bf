"""The memory of each option's state, in bytes per parameter and worker.

    python -m benchmarks.local.state_memory [--layers 16] [--width 512] [--json FILE]
    python -m benchmarks.local.state_memory --gpt2 --only sparse_adamw

Adds up the arrays of the state on one device of a mesh. A second column has the memory that the
compiled step needs besides its arguments and results. Nothing is timed, no step is run, and no
array is made.
"""

import math

import jax
import jax.numpy as jnp

import optax_ext

from .._common import options, reports
from .._common.contestants import CONTESTANTS, find, optimizer
from .._common.display import show_rows
from ..network._problem import SHAPES

NODES, DEVICES = 2, 4
GPT2 = 124_439_808
# The contestant for each name, followed by SGD unless the name says otherwise.
NAMES = {"dense": "dense/leaves", "dense, adam behind it": "dense/leaves/adamw"}
NAMES |= {x: x for x in ("sparse_adamw", "sparse_adamw, factors", "sparse_sgd", "ok_topk_sgd")}
NAMES |= {"powersgd, rank 4": "powersgd4", "ok_topk": "ok_topk"}
NAMES |= {name: name for name in CONTESTANTS if name.startswith("ok_topk, ")}
NAMES |= {"ok_topk, threshold_reuse": "ok_topk/reuse"}
NAMES |= {name: name for name in ("topk_a", "gtopk", "topk_dsa", "topk_a, adtopk")}
NAMES |= {f"hitopk, nodes of {DEVICES}": "hitopk"}


def measure(name: str, density: float, shapes: list[tuple[int, ...]]) -> dict:
    """Bytes per parameter of the state, and of the step's temporaries; nothing is allocated."""
    contestant = NAMES[name]
    shape, names = (NODES * DEVICES,), ("w",)
    if contestant == "hitopk":
        shape, names = (NODES, DEVICES), ("node", "device")
    axis = names if len(names) > 1 else names[0]
    if contestant.endswith("adamw"):
        # Complete optimizers have a density of their own.
        tx = optimizer(contestant, None, axis)
    else:
        tx = find(contestant).make(None if contestant == "sparse_sgd" else density, axis)
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    params = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=everywhere) for x in shapes]
    size = sum(map(math.prod, shapes))
    state = optax_ext.abstract_state(tx, params, mesh)
    of_worker = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    whole, specs = jax.P(), optax_ext.state_specs(state)
    inputs, outputs = (whole, specs, whole), (whole, specs)
    # The gradients are a stand-in, the same on every worker.
    mapped = jax.shard_map(
        tx.update, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False
    )
    step = jax.jit(mapped, donate_argnums=(0, 1)).lower(params, state, params).compile()
    temporary = step.memory_analysis().temp_size_in_bytes
    return {"option": name, "n": size, "state": of_worker / size, "temporary": temporary / size}


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = options.parser_of(__doc__, "json", layers=16, density=0.01)
    # In a smaller matrix a low rank of 4 saves nothing, and `powersgd` refuses it.
    parser.add_argument("--width", type=options.at_least(9), default=512)
    parser.add_argument("--gpt2", action="store_true", help="the leaves of GPT-2 instead")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="OPTION", help="of these")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", NODES * DEVICES)
    shapes = [(args.width, args.width), (args.width,)] * args.layers
    if args.gpt2:
        shapes = SHAPES["gpt2"](GPT2)
    rows = [measure(name, args.density, shapes) for name in args.only or NAMES]
    title = f"bytes per parameter, {NODES * DEVICES} workers, {len(shapes)} leaves"
    show_rows(f"{title}, density {args.density:g}", rows)
    reports.write(args.json, rows)


if __name__ == "__main__":
    raise SystemExit(main())
