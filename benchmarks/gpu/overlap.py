"""Which collectives XLA overlaps with the matrix products of a training step, on a described GPU.

    python -m benchmarks.gpu.overlap [--write FILE]

Compiles a chain of dense layers on eight H100 with the latency-hiding scheduler. For each
collective of the steady step it prints how many matrix products are between its start and its end:
0 means that the device waits. Nothing is run, and nothing is timed.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optax_ext

from .._common import options, reports
from .._common.contestants import find
from .._common.display import show
from . import _described
from ._contestants import AXIS
from ._hlo import Instruction, parse

LAYERS, WIDTH, EXAMPLES, DEVICES, DENSITY = 6, 2048, 512, 8, 0.01
# The transformations before SGD, by the names of their contestants.
_NAMES = (
    "delayed(dense)",
    "partitioned_topk",
    "bucketed(partitioned_topk, 3)",
    "delayed(partitioned_topk)",
)
_NAMES += ("ok_topk", "delayed(ok_topk)")
REDUCTIONS = {"dense": "dense/leaves"} | {name: name for name in _NAMES}
_SCHEDULER: Any = {"xla_gpu_enable_latency_hiding_scheduler": True}


def compiled(reduction: optax.GradientTransformation, mesh: Mesh) -> str:
    """The program of a training step, as text."""
    tx = optax.chain(reduction, optax.sgd(0.1))
    layer = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = {f"layer_{i}": layer for i in range(LAYERS)}
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, dict(mesh.shape)), params)
    specs = optax_ext.state_specs(state)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params.values():
            x = jnp.tanh(x @ layer)
        return jnp.mean(x**2)

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        mine = jax.tree.map(lambda p: jax.lax.pcast(p, AXIS, to="varying"), params)
        gradients = jax.grad(loss)(mine, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs))
    given = jax.ShapeDtypeStruct((DEVICES * EXAMPLES, WIDTH), jnp.float32)
    lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(params, state, given)
    return str(lowered.compile(compiler_options=_SCHEDULER).as_text())


def beside(lines: Iterable[Instruction]) -> Iterator[tuple[str, int]]:
    """Each collective that has a start and an end, and the products between them."""
    started: dict[str, int] = {}
    products = 0
    for line in lines:
        products += _is_product(line)
        if re.fullmatch(r"(all|reduce|collective)-[a-z\-]+-start", line.opcode):
            started[line.name] = products
        elif line.opcode.endswith("-done") and line.operands and line.operands[0] in started:
            kind = line.opcode.removesuffix("-done")
            yield kind, products - started.pop(line.operands[0])


def _is_product(line: Instruction) -> bool:
    """Whether an instruction is a matrix product, of a library or of XLA's own."""
    return "dot_general" in line.text("op_name") and line.opcode in ("custom-call", "fusion")


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = options.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=REDUCTIONS, help="these reductions")
    parser.add_argument("--write", type=options.output, metavar="FILE", help="also write it here")
    args = parser.parse_args(argv)
    mesh = _described.mesh(DEVICES)
    rows: list[dict[str, Any]] = []
    for name in args.only or REDUCTIONS:
        program = parse(compiled(find(REDUCTIONS[name]).make(DENSITY, AXIS), mesh))
        lines = program.computations[program.entry].values()
        found = [{"collective": kind, "products": count} for kind, count in beside(lines)]
        products = sum(map(_is_product, lines))
        rows.append({"reduction": name, "products": products, "beside": found})
    content = {"jax": jax.__version__, "layers": LAYERS, "width": WIDTH, "devices": DEVICES}
    reports.write(args.write, content | {"programs": rows})
    found = [[f"{x['collective']} {x['products']}" for x in row["beside"]] for row in rows]
    show(
        f"{LAYERS} layers of {WIDTH} x {WIDTH}, {_described.NAME}, {DEVICES} devices",
        ["reduction", "products", "collectives, and the products beside each"],
        [[x["reduction"], str(x["products"]), ", ".join(each)] for x, each in zip(rows, found)],
    )


if __name__ == "__main__":
    sys.exit(main())
