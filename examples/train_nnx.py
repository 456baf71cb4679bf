"""Trains an image classifier of flax nnx with `sparse_adamw` on simulated workers.

    python examples/train_nnx.py
    python examples/train_nnx.py --compare --out digits.png
    python examples/train_nnx.py --data FOLDER_WITH_IDX_FILES --steps 1000

`nnx.split` takes the parameters out of the model, and the loss puts them back. The optimizer is
optax's, so that `make_train_step` can make the step. `--compare` also trains with the dense AdamW,
from the same parameters and on the same batches.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import optax_ext
from _data import Dataset, InputError, batches, digits, idx_folder
from _options import check_batch, check_outputs, numbers_of, training_parser
from _report import Run, draw, traffic
from _workers import start_workers


class Classifier(nnx.Module):
    """Two convolutions and a perceptron: 35,434 parameters on images of 8x8."""

    def __init__(self, shape: tuple[int, ...], classes: int, rngs: nnx.Rngs):
        height, width = (-(-size // 2) for size in shape)  # after a stride of 2
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.hidden = nnx.Linear(16 * height * width, 128, rngs=rngs)
        self.out = nnx.Linear(128, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps f32[batch, height, width] to logits, f32[batch, classes]."""
        x = nnx.relu(self.second(nnx.relu(self.first(images[..., None]))))
        return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))


def train(
    tx: optax.GradientTransformation,
    data: Dataset,
    mesh: jax.sharding.Mesh,
    options: argparse.Namespace,
) -> Run:
    """Trains from the seed in `options`."""
    shape = data.train_images.shape[1:]
    graph, params = nnx.split(Classifier(shape, data.classes, rngs=nnx.Rngs(options.seed)))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))

    def loss_fn(params, batch):
        images, labels = batch
        logits = nnx.merge(graph, params)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    opt_state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss_fn, tx, mesh)
    stream = batches(data.train_images, data.train_labels, size=options.batch, seed=options.seed)
    history = []
    for _ in range(options.steps):
        params, opt_state, loss = step(params, opt_state, next(stream))
        # Copied to the host at once, because the next step reuses the memory of the state.
        history.append(jax.device_get((loss, optax_ext.get_info(opt_state))))

    if optax_ext.get_state(opt_state) is not None:  # not the dense one
        params, _ = optax_ext.flush(params, opt_state)  # applies a share of the residuals
    params = jax.device_get(params)
    logits = nnx.merge(graph, params)(data.test_images)
    losses, infos = zip(*history, strict=True)
    return Run(
        size=size,
        accuracy=float(np.mean(np.argmax(logits, axis=-1) == data.test_labels)),
        train_loss=float(loss_fn(params, (data.train_images, data.train_labels))),
        losses=np.asarray(losses, np.float64),
        **traffic(infos),
    )


def compare(options: argparse.Namespace) -> None:
    """Trains with `sparse_adamw`, and also dense on request; prints a line for each."""
    data = idx_folder(options.data) if options.data else digits()
    mesh = start_workers(options.workers)
    rate = optax.cosine_decay_schedule(options.lr, options.steps)
    methods = {"sparse_adamw": optax_ext.sparse_adamw(rate, density=options.density, axis="data")}
    if options.compare:
        methods["dense"] = optax.chain(optax_ext.dense(axis="data"), optax.adamw(rate))
    runs = {}
    for name, tx in methods.items():
        run = runs[name] = train(tx, data, mesh, options)
        print(
            f"{name}: test accuracy {run.accuracy:.2%}, train loss {run.train_loss:.4f}, "
            f"{run.words.mean():,.0f} words a step for {run.size:,} parameters",
            flush=True,
        )
    if options.out:
        draw(runs, options.out)
        print(f"wrote {options.out}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
    parser = training_parser("Train a classifier of flax nnx.", steps=200, batch=128, rate=0.003)
    numbers_of(parser)("--density", float, 0.05, 1e-6, 1.0, "k/n of sparse_adamw")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder of IDX files, instead of digits")
    add("--compare", action="store_true", help="train with the dense AdamW, too")
    add("--out", type=Path, metavar="FILE", help="a figure of the loss, if asked for")
    options = parser.parse_args(argv)
    check_batch(parser, options)
    check_outputs(parser, options.out)
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    try:
        compare(parse(argv))
    except InputError as error:
        print(f"train_nnx.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
