"""The cost of the first step in processor seconds and memory, by the number of leaves.

    python -m benchmarks.local.compile_time [--leaves 1 150 300 1002] [--workers 8] [--json FILE]

Each first step of `make_train_step` runs in a process of its own, without a cache: forward and
backward pass, `ahead`, the exchange and the update, traced, compiled and taken once. The program
reports the seconds of all its processors and its peak memory. Six leaves are half a layer of GPT-2:
scale and shift of a norm, two matrices, two biases. One leaf is one matrix. The layers are small,
because n has much less influence on the compilation.
"""

import argparse
import itertools
import resource
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import optax_ext

from .._common import options, reports
from .._common.contestants import optimizer
from .._common.display import show_rows
from .._common.processes import in_new_process

AXIS = "workers"
# The contestant for each name; a complete optimizer has its own density.
NAMES = {"dense, AdamW": "dense/leaves/adamw", "sparse_adamw": "sparse_adamw"}
NAMES |= {"ok_topk_sgd": "ok_topk_sgd"}
DENSITY = 0.01
# Entries of a hidden state, and between the two matrices.
WIDTH, INNER = 32, 128


def layers(leaves: int) -> list[dict[str, jax.Array]]:
    """Parameters with so many leaves: one, or a multiple of six."""
    if leaves == 1:
        return [{"up": jnp.full((WIDTH, WIDTH), 0.1)}]
    shapes = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    vectors = {"shift": WIDTH, "up_bias": INNER, "down_bias": WIDTH}
    return [
        {name: jnp.full(shape, 0.1) for name, shape in shapes.items()}
        | {name: jnp.zeros(size) for name, size in vectors.items()}
        | {"scale": jnp.ones(WIDTH)}
        for _ in range(leaves // 6)
    ]


def loss(params: list[dict[str, jax.Array]], batch: jax.Array) -> jax.Array:
    """The loss of residual blocks, or of one matrix.

    Each block normalizes its output. If it normalized its input, as GPT-2 does, the compile time
    of this function alone would grow with the third power of its depth on CPU (54 s for 300
    leaves, and 2 s as it is), and would hide what the optimizer adds.
    """
    x = batch
    for layer in params:
        if "scale" not in layer:
            x = x @ layer["up"]
            continue
        h = jax.nn.gelu(x @ layer["up"] + layer["up_bias"])
        h = h @ layer["down"] + layer["down_bias"]
        h = h - jnp.mean(h, axis=-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-5)
        x = x + h * layer["scale"] + layer["shift"]
    return jnp.mean(x**2)


def first_step(name: str, leaves: int, workers: int) -> dict[str, float]:
    """Processor seconds of the first step, and the peak memory of this process in MiB."""
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_num_cpu_devices", workers)
    mesh = jax.make_mesh((workers,), (AXIS,), axis_types=(AxisType.Auto,))
    density = None if name == "sparse_adamw" else DENSITY
    tx, params = optimizer(NAMES[name], density, AXIS), layers(leaves)
    state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss, tx, mesh)
    batch = jnp.ones((workers, WIDTH)) * jnp.arange(WIDTH)
    jax.block_until_ready((params, state, batch))
    began = time.process_time()
    jax.block_until_ready(step(params, state, batch))
    seconds = time.process_time() - began
    # In KiB on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_seconds": seconds, "peak_mib": peak}


def whole_layers(text: str) -> int:
    """The type of a number of leaves."""
    number = options.at_least_one(text)
    if number != 1 and number % 6:
        raise argparse.ArgumentTypeError(f"{text} is neither 1 nor a multiple of 6")
    return number


@options.program
def main(argv: list[str] | None = None) -> None:
    """Takes the first steps, and prints the table."""
    parser = options.parser_of(__doc__, "json", workers=8, rounds=1)
    given = {"nargs": "+", "default": [1, 150, 300, 1002]}
    parser.add_argument("--leaves", type=whole_layers, **given)
    args = parser.parse_args(argv)
    rows, settings = [], {"jax": jax.__version__, "workers": args.workers, "rounds": args.rounds}
    for leaves, name in itertools.product(args.leaves, NAMES):
        options.say(f"{name}, {leaves} leaves")
        case = first_step, name, leaves, args.workers
        found = [in_new_process(*case) for _ in range(args.rounds)]
        each = {key: [one[key] for one in found] for key in found[0]}
        rows.append({"contestant": name, "leaves": leaves, **each})
        # After each, because the long ones come last.
        reports.write(args.json, {**settings, "rows": rows})
    title = f"first step of {args.workers} workers on this machine"
    show_rows(title, rows)


if __name__ == "__main__":
    raise SystemExit(main())
