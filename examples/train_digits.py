"""Trains a small network on simulated workers, dense and in two sparse ways, and compares them.

    python examples/train_digits.py
    python examples/train_digits.py --data FOLDER_WITH_IDX_FILES --density 0.001 --out fashion.png
    python examples/train_digits.py --optimizer sgd

All runs start from the same parameters and see the same batches. They differ in the optimizer:
`optimizers` makes them, and `train` below is the part to copy. The table and the figure show loss
and accuracy against the words (4-byte units) that each worker receives.

Clean digits are soon memorized, and every loss is then almost 0. So each image gets new noise
whenever it is seen (`--noise`), and the comparison uses the loss on held-out images.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import optax_ext
from _data import Dataset, InputError, batches, digits, idx_folder
from _options import FIGURES, check_batch, check_outputs, numbers_of, parser_of
from _report import (
    HeldOut,
    Run,
    draw,
    make_table,
    remarks,
    summary,
    title_of,
    traffic,
    write_atomically,
)
from _workers import start_workers
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
# The deviation of the noise, next to 1 for the pixels, and the copies of each held-out image.
NOISE, COPIES = 1.0, 8
# Evaluations on the held-out images: this many in equal steps, and this many in equal ratios.
LOOKS = 40


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
    """Returns the compared optimizers by name."""
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
            "sparse_adamw": optax_ext.sparse_adamw(rate, density=density, axis="data"),
            "ok_topk": optax.chain(sparse, optax.adamw(rate)),
        }
    dense = optax.chain(optax_ext.dense(axis="data"), optax.sgd(rate, momentum=MOMENTUM))
    return {
        "dense": dense,
        "sparse_sgd": optax_ext.sparse_sgd(
            lambda step: rate(step) / (1 - MOMENTUM), density=density, axis="data"
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

    def losses_of(params, batch):
        images, labels = batch
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits

    def loss_fn(params, batch):
        return losses_of(params, batch)[0].mean()

    @jax.jit
    def look(params):
        losses, logits = losses_of(params, held_out)
        return losses, logits.argmax(-1) == held_out[1]

    params = model.init(jax.random.key(options.seed), data.train_images[:1])["params"]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    opt_state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss_fn, tx, mesh)

    held_out = noisy(data.test_images, data.test_labels, options)
    stream = noisy_batches(data, options)
    history, looks = [], {}
    when = {*np.geomspace(1, options.steps, LOOKS, dtype=int)}
    when |= {*np.linspace(1, options.steps, LOOKS, dtype=int)}
    for number in range(1, options.steps + 1):
        params, opt_state, loss = step(params, opt_state, next(stream))
        # Copied to the host at once, because the next step reuses the memory of the state.
        history.append(jax.device_get((loss, optax_ext.get_info(opt_state))))
        if number in when:
            looks[number] = look(jax.device_get(params))
        advance()

    losses, infos = zip(*history, strict=True)
    # For each held-out image, the mean over its copies.
    of_images = [
        np.asarray(x, np.float64).reshape(-1, len(data.test_images)).mean(0)
        for x in looks[options.steps]
    ]
    return Run(
        size=size,
        accuracy=float(of_images[1].mean()),
        train_loss=float(loss_fn(params, noisy(data.train_images, data.train_labels, options))),
        losses=np.asarray(losses, np.float64),
        held_out=HeldOut(
            {at: float(losses.mean()) for at, (losses, _) in looks.items()}, *of_images
        ),
        **traffic(infos),
    )


def noisy_batches(
    data: Dataset, options: argparse.Namespace
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of the training images without end, with new noise each time."""
    random = np.random.default_rng((options.seed, 1))
    stream = batches(data.train_images, data.train_labels, size=options.batch, seed=options.seed)
    for images, labels in stream:
        noise = random.standard_normal(images.shape, np.float32)
        yield images + np.float32(options.noise) * noise, labels


def noisy(
    images: np.ndarray, labels: np.ndarray, options: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray]:
    """The images `COPIES` times, each time with other noise; the same at every call."""
    copies = COPIES if options.noise else 1
    images, labels = np.concatenate([images] * copies), np.concatenate([labels] * copies)
    noise = np.random.default_rng(0).standard_normal(images.shape, np.float32)
    return images + np.float32(options.noise) * noise, labels


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
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
    add(
        "--noise",
        float,
        None,
        0.0,
        100.0,
        f"deviation of the noise, that of the pixels being 1; {NOISE:g} on digits, 0 with --data",
    )
    parser.add_argument(
        "--out",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the figure, {', '.join(FIGURES)} (default: digits.png in a new folder among the "
        f"system's temporary files, {tempfile.gettempdir()}; its name is printed)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    options = parser.parse_args(argv)
    options.lr = options.lr or RATES[options.optimizer]
    if options.noise is None:
        options.noise = 0.0 if options.data else NOISE
    check_batch(parser, options)
    check_outputs(parser, options.out, options.json)
    return options


def compare(options: argparse.Namespace) -> None:
    """Trains with each, prints the table, and writes the figure."""
    data = idx_folder(options.data) if options.data else digits()
    if options.batch > len(data.train_images):
        raise InputError(f"--batch is {options.batch}, of {len(data.train_images)} images")
    mesh = start_workers(options.workers)
    with figure_file(options.out) as output:
        print(f"the figure will be {output}", flush=True)
        columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn())
        runs = {}
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            for name, tx in optimizers(options).items():
                task = progress.add_task(name, total=options.steps)
                runs[name] = train(
                    tx, data, mesh, options, lambda task=task: progress.advance(task)
                )

        numbers = summary(runs, options)
        Console().print(make_table(numbers))
        for line in remarks(numbers):
            print(line)
        draw(runs, output, title=title_of(numbers))
        print(f"wrote {output}")
    if options.json:
        text = json.dumps(numbers, indent=2) + "\n"
        write_atomically(options.json, lambda part: part.write_text(text))


@contextlib.contextmanager
def figure_file(given: Path | None) -> Generator[Path]:
    """The path of the figure; a folder that was made for it is removed if it stays empty."""
    if given:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="train_digits-"))
    try:
        yield folder / "digits.png"
    finally:
        with contextlib.suppress(OSError):  # It is not empty.
            folder.rmdir()


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
