"""Trains a small network on simulated workers, dense and in two sparse ways, and compares them.

    python examples/train_digits.py
    python examples/train_digits.py --data FOLDER_WITH_IDX_FILES --density 0.001 --out fashion.png
    python examples/train_digits.py --optimizer sgd

All runs start from the same parameters and see the same batches. They differ in the optimizer:
`optimizers` makes them, and `train` below is what to copy. The table and the figure set loss and
accuracy against the words (4-byte units) that each worker receives.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import optax_ext
from _data import Dataset, InputError, batches, digits, idx_folder
from _options import numbers_of, parser_of
from _report import FORMATS, Run, draw, make_table, summary, traffic, write_atomically
from sparse_collectives import select, wire

CODECS = {
    "raw": wire.raw,
    "bf16": wire.bf16,
    "narrow16": wire.narrow16,
    "narrow8": wire.narrow8,
    "qsgd8": lambda: wire.qsgd(bits=8),
    "qsgd4": lambda: wire.qsgd(bits=4),
}
SELECTORS = {"topk": select.topk, "threshold_reuse": select.threshold_reuse}
RATES = {"adamw": 0.003, "sgd": 0.05}
MOMENTUM = 0.9


class Classifier(nn.Module):
    """A perceptron with two hidden layers: 85,002 parameters on 8x8 images."""

    classes: int
    hidden: int = 256

    @nn.compact
    def __call__(self, images):
        """Maps f32[batch, height, width] to logits, f32[batch, classes]."""
        x = images.reshape(images.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.classes)(x)


def optimizers(options: argparse.Namespace) -> dict[str, optax.GradientTransformation]:
    """Returns what is compared, by name."""
    rate = optax.cosine_decay_schedule(options.lr, options.steps)
    selector = SELECTORS[options.selector](density=options.density)
    sparse = optax_ext.ok_topk(
        options.density, axis="data", selector=selector, codec=CODECS[options.codec]()
    )
    # Few bits for an index and a value: five times the entries in the words of Ok-Topk.
    density = min(1.0, 5 * options.density)
    if options.optimizer == "adamw":
        return {
            "dense": optax.chain(optax_ext.dense(axis="data"), optax.adamw(rate)),
            "sparse_adamw": optax_ext.sparse_adamw(rate, density, axis="data"),
            "ok_topk": optax.chain(sparse, optax.adamw(rate)),
        }
    dense = optax.chain(optax_ext.dense(axis="data"), optax.sgd(rate, momentum=MOMENTUM))
    return {
        "dense": dense,
        "sparse_sgd": optax_ext.sparse_sgd(
            lambda step: rate(step) / (1 - MOMENTUM), density, axis="data"
        ),
        "ok_topk": optax.chain(sparse, optax.sgd(rate, momentum=MOMENTUM)),
    }


def train(
    tx: optax.GradientTransformation,
    data: Dataset,
    mesh: jax.sharding.Mesh,
    options: argparse.Namespace,
    advance: Callable[[], None],
) -> Run:
    """Trains from the seed in `options`."""
    model = Classifier(data.classes)

    def loss_fn(params, batch):
        images, labels = batch
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params = model.init(jax.random.key(options.seed), data.train_images[:1])["params"]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    opt_state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss_fn, tx, mesh)

    stream = batches(data.train_images, data.train_labels, size=options.batch, seed=options.seed)
    history = []
    for _ in range(options.steps):
        params, opt_state, loss = step(params, opt_state, next(stream))
        # Copied to the host at once, because the next step reuses the memory of the state.
        history.append(jax.device_get((loss, optax_ext.get_info(opt_state))))
        advance()

    params = jax.device_get(params)
    logits = model.apply({"params": params}, data.test_images)
    losses, infos = zip(*history, strict=True)
    return Run(
        size=size,
        accuracy=float(np.mean(np.argmax(logits, axis=-1) == data.test_labels)),
        train_loss=float(loss_fn(params, (data.train_images, data.train_labels))),
        losses=np.asarray(losses, np.float64),
        **traffic(infos, size=size, workers=options.workers),
    )


def start_workers(count: int) -> jax.sharding.Mesh:
    """Returns a mesh of `count` simulated CPU devices, the workers, on one axis "data"."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax runs already, as it does in a test: take the devices it has
        pass
    devices = jax.devices("cpu")[:count]
    if len(devices) < count:
        raise InputError(f"--workers is {count}, but jax runs with {len(devices)} devices")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), ("data",), axis_types=auto, devices=devices)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line when one of them is wrong."""
    parser = parser_of("Train dense and sparse on simulated workers, and compare.")
    add = numbers_of(parser)

    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of IDX files, .gz or not, instead of digits",
    )
    add("--workers", int, 8, 1, 64, "simulated workers")
    add(
        "--density",
        float,
        0.01,
        1e-6,
        1.0,
        "k/n of Ok-Topk; the others have five times the entries",
    )
    add("--steps", int, 400, 1, 10**7, "steps of each run")
    add("--batch", int, 128, 1, 10**7, "images in a batch of all workers together")
    add("--lr", float, None, 1e-9, 1e3, "peak of the learning rate, 0.003 for AdamW, 0.05 for SGD")
    add("--seed", int, 0, 0, 2**31 - 1, "of the parameters and of the order of the images")
    parser.add_argument(
        "--optimizer", choices=RATES, default="adamw", help="AdamW, or SGD with momentum (adamw)"
    )
    parser.add_argument(
        "--selector",
        choices=SELECTORS,
        default="topk",
        help="how Ok-Topk selects: exactly, or by the reused threshold of the paper (topk)",
    )
    parser.add_argument(
        "--codec", choices=CODECS, default="raw", help="how Ok-Topk's messages are encoded (raw)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("digits.png"), help="the figure (digits.png)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    options = parser.parse_args(argv)
    options.lr = options.lr or RATES[options.optimizer]
    if options.batch % options.workers:
        parser.error(f"--batch {options.batch} is not divisible by --workers {options.workers}")
    if options.out.suffix not in FORMATS:
        parser.error(f"--out {options.out} must end in one of {', '.join(FORMATS)}")
    for path in filter(None, (options.out, options.json)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot create the folder of {path}: {error.strerror}")
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            parser.error(f"cannot write {path}")
    return options


def compare(options: argparse.Namespace) -> None:
    """Trains with each, prints the table, and writes the figure."""
    data = idx_folder(options.data) if options.data else digits()
    if options.batch > len(data.train_images):
        raise InputError(f"--batch is {options.batch}, of {len(data.train_images)} images")
    mesh = start_workers(options.workers)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn())
    runs = {}
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        for name, tx in optimizers(options).items():
            task = progress.add_task(name, total=options.steps)
            runs[name] = train(tx, data, mesh, options, lambda task=task: progress.advance(task))

    numbers = summary(runs, options)
    Console().print(make_table(numbers))
    draw(runs, options.out)
    print(f"wrote {options.out}")
    if options.json:
        text = json.dumps(numbers, indent=2) + "\n"
        write_atomically(options.json, lambda part: part.write_text(text))


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    try:
        compare(parse(argv))
    except InputError as error:
        print(f"train_digits.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
