"""Times whole training steps of a GPT on a GPU, and shows the memory of each.

    python -m benchmarks.gpu.train_step [--batch 8] [--json gpu_train_step.json]

The model has the leaves of GPT-2 (124M parameters, 148 leaves); activations are bfloat16 and
parameters float32. With one worker nothing is exchanged, so the difference to AdamW alone is the
arithmetic of an optimizer. The steps take turns. The table has the bytes of the optimizer state per
parameter, and the temporary memory of the compiled step.
"""

import concurrent.futures
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import optax_ext

from .._common import options, reports, timing
from .._common.contestants import DECAY, RATE, optimizer
from .._common.display import show_rows
from ..training._small_models import affine

AXIS = "data"
BASE = "AdamW alone"
# The contestant for each name; a complete optimizer has its own density.
NAMES = {
    "dense, AdamW": "dense/leaves/adamw",
    "sparse_adamw": "sparse_adamw",
    "powersgd(1), AdamW": "powersgd1/adamw",
    "ok_topk, AdamW": "ok_topk/reuse/adamw",
}
DENSITY, VOCABULARY, CONTEXT = 0.01, 50_257, 1024
Batch = tuple[jax.Array, jax.Array]


def gpt(
    width: int, blocks: int, vocabulary: int = VOCABULARY, context: int = CONTEXT, seed: int = 0
) -> Any:
    """Random parameters of a GPT, in the leaves of GPT-2."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(0.02 * random.standard_normal(shape, np.float32))

    def norm() -> Any:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def layer(inputs: int, outputs: int) -> Any:
        return {"kernel": matrix(inputs, outputs), "bias": jnp.zeros(outputs)}

    block = {"qkv": (1, 3), "mix": (1, 1), "up": (1, 4), "down": (4, 1)}
    return {
        "embedding": matrix(vocabulary, width),
        "position": matrix(context, width),
        "blocks": [
            {name: layer(x * width, y * width) for name, (x, y) in block.items()}
            | {"norm_0": norm(), "norm_1": norm()}
            for _ in range(blocks)
        ],
        "norm": norm(),
    }


def loss(heads: int, params: Any, batch: Batch) -> jax.Array:
    """The mean cross-entropy of the next tokens, ``batch`` being inputs and targets i32[B, T]."""
    tokens, targets = batch
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = params["embedding"][tokens] + params["position"][: tokens.shape[1]]
    for block in params["blocks"]:
        split = affine(block["qkv"], _normed(block["norm_0"], x))
        split = split.reshape(*x.shape[:2], 3, heads, -1)
        mixed = jax.nn.dot_product_attention(*(split[:, :, i] for i in range(3)), is_causal=True)
        x = x + affine(block["mix"], mixed.reshape(x.shape))
        inner = jax.nn.gelu(affine(block["up"], _normed(block["norm_1"], x)))
        x = x + affine(block["down"], inner)
    logits = _normed(params["norm"], x) @ params["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


def _normed(layer: Any, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * layer["scale"] + layer["bias"]


class Contestant:
    """A training step, which goes on from its last state once it is compiled."""

    def __init__(self, name: str, loss_fn: Callable[..., Any], params: Any, batch: Batch):
        mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,), axis_types=(AxisType.Auto,))
        # Donated, so every contestant has its own.
        params = jax.tree.map(jnp.copy, params)
        if name == BASE:
            tx = optax.adamw(RATE, weight_decay=DECAY)
            state = jax.jit(tx.init)(params)
            step: Any = _alone(tx, loss_fn)
        else:
            whole = NAMES[name] == "sparse_adamw"
            tx = optimizer(NAMES[name], None if whole else DENSITY, AXIS)
            state = optax_ext.init_state(tx, params, mesh)
            step = optax_ext.make_train_step(loss_fn, tx, mesh)
        entries = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / entries
        self._lowered, self._held = step.lower(params, state, batch), (params, state)

    def compile(self, compiler: dict[str, Any] | None = None) -> None:
        """Compiles the step, with options of XLA; several threads may do so for several steps."""
        self.compiled = self._lowered.compile(compiler)
        self.temporary_bytes = self.compiled.memory_analysis().temp_size_in_bytes

    def __call__(self, batch: Batch) -> jax.Array:
        """Takes a step, and returns its loss before it is ready."""
        *held, value = self.compiled(*self._held, batch)
        self._held = tuple(held)
        return value


def _alone(tx: optax.GradientTransformation, loss_fn: Callable[..., Any]) -> Any:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Batch) -> Any:
        value, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def measure(
    made: dict[str, Contestant], batches: Sequence[Batch], rounds: int, calls: int
) -> list[dict[str, Any]]:
    """The rows: times of a step in turns, each of ``calls`` that are queued, and the memory."""

    def queued(contestant: Contestant, turn: int) -> jax.Array:
        return [contestant(batches[(turn + i) % len(batches)]) for i in range(calls)][-1]

    runs = {name: functools.partial(queued, contestant) for name, contestant in made.items()}
    for run in runs.values():
        jax.block_until_ready(run(0))
    times = timing.in_turns(runs, rounds)
    each = {name: [s / calls for s in seconds] for name, seconds in times.items()}
    rows = timing.ratios(each, BASE)
    for row in rows:
        contestant = made[row["contestant"]]
        row["state_bytes_per_parameter"] = contestant.state_bytes
        row["temporary_gb"] = contestant.temporary_bytes / 1e9
        row["loss"] = float(contestant(batches[0]))
    return rows


@options.program
def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = options.parser_of(__doc__, "json", batch=8, rounds=15)
    add = parser.add_argument
    add("--calls", type=options.several, default=10, help="queued steps of a round")
    add("--width", type=options.several, default=768)
    add("--blocks", type=options.at_least_one, default=12)
    add("--context", type=options.several, default=CONTEXT)
    args = parser.parse_args(argv)
    random, heads = np.random.default_rng(1), max(1, args.width // 64)
    tokens = random.integers(0, VOCABULARY, (3, args.batch, args.context + 1), np.int32)
    batches = [(jnp.asarray(x[:, :-1]), jnp.asarray(x[:, 1:])) for x in tokens]
    params = gpt(args.width, args.blocks)
    make = functools.partial(
        Contestant, loss_fn=functools.partial(loss, heads), params=params, batch=batches[0]
    )
    made = {name: make(name) for name in (BASE, *NAMES)}
    # XLA compiles several programs at the same time.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(Contestant.compile, made.values()))
    rows = measure(made, batches, args.rounds, args.calls)
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    device = jax.devices()[0].device_kind
    content = {"device": device, "jax": jax.__version__, "parameters": entries}
    content |= {name: getattr(args, name) for name in ("batch", "context", "rounds", "calls")}
    reports.write(args.json, content | {"rows": rows})
    title = f"{entries:,} parameters, {args.batch} x {args.context} tokens, {device}, one worker"
    show_rows(title, rows)


if __name__ == "__main__":
    sys.exit(main())
