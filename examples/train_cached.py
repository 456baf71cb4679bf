"""Trains on simulated workers from a slow source, through a cache in memory and on local disk.

    python examples/train_cached.py
    python examples/train_cached.py --cache FOLDER       # again: the disk level has all records
    python examples/train_cached.py --data FOLDER_OF_CLASSES --size 64 --bandwidth inf --latency 0

Each worker reads and caches its share of the images. The first epoch takes them from the source,
here one that is slowed down like a network file system, and the later ones from memory. A line for
each epoch says where the samples came from. docs/data_cache.md says more.
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax

import optax_ext
from _data import InputError
from _options import check_batch, numbers_of, parser_of
from _workers import start_workers
from data_cache import (
    Augment,
    CacheError,
    Counts,
    DataCache,
    Decode,
    Digits,
    Disk,
    ImageFolder,
    Loader,
    Memory,
    Throttled,
    stamp,
)
from train_digits import Classifier

MEGABYTE = 10**6
COLUMNS = {
    "epoch": 5,
    "samples/s": 9,
    "waiting": 7,
    "memory hits": 11,
    "disk hits": 9,
    "source reads": 12,
    "source MB": 9,
    "memory MB": 9,
    "disk MB": 8,
    "loss": 7,
}


class Waiting:
    """An iterator that counts the seconds its user waits for it."""

    def __init__(self, items: Iterator):
        """Counts for `items`."""
        self._items, self.seconds = items, 0.0

    def __iter__(self) -> "Waiting":
        """Itself."""
        return self

    def __next__(self):
        """The next item."""
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - start


def train(options: argparse.Namespace, say) -> float | None:
    """Trains, and returns the accuracy on test images, where there are any."""
    images = ImageFolder(options.data) if options.data else Digits()
    decode = Decode(options.size, 3) if options.data else Decode(8, 1)
    augment = Augment(shift=max(1, options.size // 16), mirror=True) if options.data else Augment(1)
    source = Throttled(
        images, bytes_per_second=options.bandwidth * MEGABYTE, latency=options.latency / 1e3
    )
    mesh = start_workers(options.workers)
    with contextlib.ExitStack() as stack:
        disk = None
        if options.cache:
            disk = Disk(
                options.cache,
                stamp(source, options.holds, decode),
                limit=_bytes(options.disk_limit),
            )
            stack.callback(disk.close)
        # A cache for each worker: on a cluster each is in the memory of another node.
        caches = [
            DataCache(
                source,
                decode,
                memory=Memory(_bytes(options.memory_limit)),
                disk=disk,
            )
            for _ in range(options.workers)
        ]
        loaders = [
            Loader(
                cache,
                worker=worker,
                workers=options.workers,
                batch=options.batch // options.workers,
                seed=options.seed,
                augment=augment,
                reshuffle=options.reshuffle,
                threads=options.threads,
            )
            for worker, cache in enumerate(caches)
        ]
        shapes = (decode.shape, len(images.classes))
        params = fit(loaders, caches, disk, mesh, shapes, options, say)
    if options.data:
        return None
    test = Digits("test")
    samples = [decode(test[index]) for index in range(len(test))]
    logits = Classifier(10).apply({"params": params}, np.stack([x["image"] for x in samples]))
    labels = np.stack([x["label"] for x in samples])
    return float(np.mean(np.argmax(logits, axis=-1) == labels))


def fit(loaders, caches, disk, mesh, shapes, options, say):
    """The training loop; returns the parameters, and says of each epoch what the caches did."""
    image_shape, classes = shapes
    model = Classifier(classes)

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    steps = loaders[0].steps
    rate = optax.cosine_decay_schedule(options.lr, options.epochs * steps)
    tx = optax_ext.sparse_adamw(rate, density=options.density, axis="data")
    nothing = {
        "image": np.zeros((options.batch, *image_shape), np.float32),
        "label": np.zeros(options.batch, np.int32),
    }
    init = jax.jit(lambda: model.init(jax.random.key(options.seed), nothing["image"][:1])["params"])
    step = optax_ext.make_train_step(loss_fn, tx, mesh)
    # Once beforehand, so that the first epoch is not about compiling; the state is thrown away.
    jax.block_until_ready(step(init(), optax_ext.init_state(tx, init(), mesh), nothing))
    params = init()
    opt_state = optax_ext.init_state(tx, params, mesh)

    say(*COLUMNS)
    before = Counts()
    for epoch in range(options.epochs):
        start = time.perf_counter()
        batches = Waiting(global_batches(loaders, epoch))
        losses = []
        for batch in batches:
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(loss)
        losses = jax.device_get(losses)
        seconds = time.perf_counter() - start
        after = sum((cache.counts for cache in caches), Counts())
        done, before = after - before, after
        say(
            epoch + 1,
            f"{options.batch * steps / seconds:,.0f}",
            f"{batches.seconds / seconds:.0%}",
            *(
                f"{n / done.samples:.1%}"
                for n in (done.memory_hits, done.disk_hits, done.source_reads)
            ),
            f"{done.source_bytes / MEGABYTE:,.2f}",
            f"{sum(cache.memory_bytes for cache in caches) / MEGABYTE:,.2f}",
            f"{disk.bytes / MEGABYTE:,.2f}" if disk is not None else "-",
            f"{np.mean(losses):.4f}",
        )
    if before.damaged:
        print(f"{before.damaged:,} damaged entries were fetched again", file=sys.stderr)
    return jax.device_get(params)


def global_batches(loaders, epoch: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of all workers, in their order: `make_train_step` deals them out again."""
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(contextlib.closing(x.epoch(epoch))) for x in loaders]
        for rows in zip(*parts, strict=True):
            yield {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _bytes(megabytes: float) -> int | None:
    return None if math.isinf(megabytes) else round(megabytes * MEGABYTE)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line when one of them is wrong."""
    parser = parser_of("Train from a slow source, through a cache.")
    add = numbers_of(parser)
    inf = math.inf
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="images as DIR/<class>/<name>.jpg, not digits"
    )
    add("--size", int, 96, 1, 4096, "pixels to which the images of --data are scaled")
    add("--bandwidth", float, 1.0, 1e-6, inf, "MB/s of the source; inf: as it is")
    add("--latency", float, 5.0, 0, 1e6, "milliseconds of each read from the source")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="folder of the disk level")
    parser.add_argument(
        "--holds",
        choices=("records", "samples"),
        default="records",
        help="what the disk level holds: records as read, or samples as prepared (records)",
    )
    add("--disk-limit", float, inf, 0, inf, "MB of the disk level")
    add("--memory-limit", float, inf, 0, inf, "MB of each worker's memory level; 0: none")
    parser.add_argument(
        "--reshuffle",
        action="store_true",
        help="deal the images out anew in each epoch, instead of a fixed share for each worker",
    )
    add("--threads", int, 4, 0, 256, "batches that each worker reads at once")
    add("--workers", int, 4, 1, 64, "simulated workers")
    add("--epochs", int, 4, 1, 10**6, "epochs")
    add("--batch", int, 64, 1, 10**7, "images in a batch of all workers together")
    add("--lr", float, 0.003, 1e-9, 1e3, "peak of the learning rate of sparse_adamw")
    add("--density", float, 0.05, 1e-6, 1.0, "of sparse_adamw")
    add("--seed", int, 0, 0, 2**31 - 1, "of parameters, order and augmentation")
    options = parser.parse_args(argv)
    check_batch(parser, options)
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    options = parse(argv)

    def say(*cells: str) -> None:
        print("  ".join(f"{x:>{n}}" for x, n in zip(cells, COLUMNS.values())), flush=True)

    try:
        accuracy = train(options, say)
    except (InputError, CacheError) as error:
        print(f"train_cached.py: {error}", file=sys.stderr)
        return 2
    if accuracy is not None:
        print(f"test accuracy {accuracy:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
