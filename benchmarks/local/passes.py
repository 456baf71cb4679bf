"""Passes over the parameters that a training step makes on a CPU, read from the compiled program.

    python -m benchmarks.local.passes [--only NAME ...] [--breakdown NAME] [--write FILE]
    python -m benchmarks.local.passes --check FILE

A pass reads or writes four bytes for each of the n parameters, in whichever of its arrays. A gather
or a scatter counts 32 bytes for each entry, and twice as many for an entry that it changes. The
reads and writes of the layers themselves are listed separately as "model", since they are the same
for all contestants. A conditional counts with the branch that moves most, and a loop of unknown
length does not count: a selection enters it only if the magnitude from the step before is wrong.

--breakdown shows the functions that the passes of one step come from. --check compares with a file
of --write; the status is 1 if a step makes half a pass more. Nothing is timed.
"""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import optax_ext

from .._common import contestants, options, reports
from .._common.display import show_rows
from ..gpu._contestants import layers
from ..gpu._hlo import Program, parse
from ..gpu._paths import alone

AXIS = "workers"
SETTINGS = {"size": 4_000_000, "density": 0.01, "devices": 4}
NAMES = ("dense/adamw", "sparse_adamw", "sparse_sgd", "ok_topk/adamw", "powersgd1/adamw")
NAMES += ("quantized/adamw",)
# Less than any pass over n, and more than small buffers vary.
TOLERANCE = 0.5
PATTERN: reports.Pattern = {
    "jax": reports.text(),
    "programs": [{"program": reports.text(), "passes": reports.number(0, 1000)}],
}
_MODEL = "passes.py"
_EXAMPLES = 2


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """Uses each parameter in one product, as a layer does, whose gradient is another product."""
    outputs = [jnp.tanh(batch[:, : w.shape[0]] @ w) for w in params if w.ndim == 2]
    vectors = [jnp.sum(jnp.square(w)) for w in params if w.ndim != 2]
    return sum((jnp.mean(jnp.square(x)) for x in outputs), sum(vectors, jnp.float32(0)))


def compiled(name: str, size: int, density: float, devices: int) -> str:
    """The text of the compiled training step of a contestant."""
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    contestant = contestants.find(name)
    tx = contestants.optimizer(name, min(1.0, contestant.entries * density), AXIS)
    params = [jnp.zeros(shape) for shape in layers(size)]
    state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss, tx, mesh)
    batch = jnp.ones((_EXAMPLES * devices, max(x.shape[0] for x in params)))
    return step.lower(params, state, batch).compile().as_text()


def moved(program: Program, name: str | None = None, turns: int = 1) -> Iterator[tuple[str, float]]:
    """The function that each instruction comes from, and the bytes that it moves."""
    lines = program.computations[name or program.entry]
    for line in lines.values():
        if line.opcode == "conditional":
            branches = [list(moved(program, branch, turns)) for branch in line.reached]
            yield from max(branches, key=lambda branch: sum(x for _, x in branch))
        elif line.reached:
            known = line.trip_count if line.opcode == "while" else 1
            if known is not None:
                yield from moved(program, line.reached[0], turns * known)
        else:
            source = program.sources.get(line.frame, "-")
            yield source, turns * alone(program, lines, line)["moved"]


def passes(name: str, size: int, density: float, devices: int) -> dict[str, float]:
    """Passes of a step by the function that they come from, the most first."""
    found: dict[str, float] = collections.defaultdict(float)
    for source, count in moved(parse(compiled(name, size, density, devices))):
        found["model" if source.startswith(_MODEL) else source] += count / (4 * size)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def grown(rows: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> list[str]:
    """A line for each step that makes half a pass more than was recorded."""
    before = {row["program"]: row["passes"] for row in recorded}
    return [
        f"{row['program']}: {row['passes']} passes, {before.get(row['program'], 'none')} before"
        for row in rows
        if row["passes"] > before.get(row["program"], -1) + TOLERANCE
    ]


def row_of(name: str, found: dict[str, float]) -> dict[str, Any]:
    """The passes of a step, and separately the passes of its layers."""
    model = found.get("model", 0.0)
    return {
        "program": name,
        "passes": round(sum(found.values()) - model, 2),
        "model": round(model, 2),
    }


@options.program
def main(argv: list[str] | None = None) -> int:
    """Prints the table, or a breakdown; status 1 if a step makes more passes."""
    parser = options.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps")
    parser.add_argument("--breakdown", choices=NAMES, help="where the passes come from")
    parser.add_argument("--write", type=options.output, metavar="FILE", help="also write them here")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with those in FILE")
    args = parser.parse_args(argv)
    options.check_names(parser, args.only, NAMES)
    recorded = reports.read(args.check, PATTERN, __spec__.name) if args.check else None
    jax.config.update("jax_num_cpu_devices", SETTINGS["devices"])
    if args.breakdown:
        found = passes(args.breakdown, **SETTINGS)
        shown = [{"function": f, "passes": round(x, 2)} for f, x in found.items() if x >= 0.05]
        show_rows(f"{args.breakdown}: passes over n", shown)
        return 0
    rows = [row_of(name, passes(name, **SETTINGS)) for name in args.only or NAMES]
    show_rows("passes over n = {size:,} on {devices} CPU devices".format(**SETTINGS), rows)
    reports.write(args.write, {"jax": jax.__version__, **SETTINGS, "programs": rows})
    complaints = grown(rows, recorded["programs"]) if recorded else []
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
