"""Trains a language model with `sparse_adamw`, and evaluates it on held-out text.

    python examples/train_text.py
    python examples/train_text.py --text FILE --steps 2000
    python examples/train_text.py --compare

A character is a token. The text is Python's own help topics unless one is given; its last 10 % are
held out. `--compare` also trains with the dense AdamW, from the same parameters and on the same
windows.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import optax_ext
from _data import InputError, text_of, windows
from _options import check_batch, numbers_of, training_parser
from _transformer import whole_model
from _workers import start_workers

CHARACTERS = 128  # ASCII


def train(
    name: str,
    tx: optax.GradientTransformation,
    text: np.ndarray,
    mesh: jax.sharding.Mesh,
    options: argparse.Namespace,
) -> float:
    """Trains from the seed in `options`, and returns the loss on the held-out text."""
    seen, held_out = np.split(text, [len(text) * 9 // 10])
    test = windows(held_out, count=64, length=options.length, seed=0)
    graph, params = whole_model(
        mesh,
        options.seed,
        characters=CHARACTERS,
        width=options.width,
        layers=options.layers,
        length=options.length,
    )

    def loss_fn(params, batch):
        logits = nnx.merge(graph, params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    opt_state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss_fn, tx, mesh)
    for number in range(1, options.steps + 1):
        seed = (options.seed, number)
        batch = windows(seen, count=options.batch, length=options.length, seed=seed)
        params, opt_state, loss = step(params, opt_state, batch)
        if number % options.report == 0 or number == options.steps:
            words = float(optax_ext.get_info(opt_state).words)
            print(f"{name}, step {number}: loss {loss:.4f}, {words:,.0f} words", flush=True)

    if optax_ext.get_state(opt_state) is not None:  # not the dense one
        params, _ = optax_ext.flush(params, opt_state)  # applies a share of the residuals
    return float(jax.jit(loss_fn)(jax.device_get(params), test))


def compare(options: argparse.Namespace) -> None:
    """Trains with `sparse_adamw`, and also dense on request; prints a line for each."""
    text = text_of(options.text)
    mesh = start_workers(options.workers)
    warmup = max(1, options.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, options.lr, warmup, options.steps)
    methods = {"sparse_adamw": optax_ext.sparse_adamw(rate, density=options.density, axis="data")}
    if options.compare:
        methods["dense"] = optax.chain(optax_ext.dense(axis="data"), optax.adamw(rate))
    for name, tx in methods.items():
        loss = train(name, tx, text, mesh, options)
        print(f"{name}: held-out loss {loss:.4f} a character, perplexity {np.exp(loss):.2f}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
    parser = training_parser("Train a language model.", steps=300, batch=32, rate=0.01)
    add = numbers_of(parser)
    add("--density", float, 0.05, 1e-6, 1.0, "k/n of sparse_adamw")
    add("--length", int, 64, 1, 10**5, "characters of a window")
    add("--width", int, 64, 4, 10**5, "of the model, a multiple of its 4 heads")
    add("--layers", int, 2, 1, 1000, "blocks of the model")
    add("--report", int, 50, 1, 10**7, "steps between two lines")
    parser.add_argument("--text", type=Path, metavar="FILE", help="plain text to learn")
    parser.add_argument("--compare", action="store_true", help="train with the dense AdamW, too")
    options = parser.parse_args(argv)
    check_batch(parser, options)
    if options.width % 4:
        parser.error(f"--width is {options.width}; it must be a multiple of 4")
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    try:
        compare(parse(argv))
    except InputError as error:
        print(f"train_text.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
