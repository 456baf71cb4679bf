"""Trains on simulated workers from a slow source, through a cache in memory and on local disk.

    python examples/train_cached.py
    python examples/train_cached.py --cache FOLDER       # again: the disk level has all records
    python examples/train_cached.py --data FOLDER_OF_CLASSES --size 64 --bandwidth inf --latency 0

The first epoch takes the images from the source, here one that is slowed down like a network file
system, and later ones take them from memory, as a line for each epoch shows.
examples/data_cache/README.md says more.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import optax

import optax_ext
from _data import InputError
from _options import check_batch, numbers_of, parser_of
from _workers import start_workers
from data_cache.cache import DataCache, Loader
from data_cache.disk import CacheError, Disk, stamp
from data_cache.images import Augment, Decode, Digits, ImageFolder, Throttled
from train_digits import Classifier

FROM = {"memory hits": "memory_hits", "disk hits": "disk_hits", "source reads": "source_reads"}
COLUMNS = ("epoch", "samples/s", "waiting", *FROM, "source MB", "memory MB", "disk MB", "loss")


def train(options: argparse.Namespace) -> None:
    """Trains, and prints a line for each epoch, and the accuracy if there are test images."""
    images = ImageFolder(options.data) if options.data else Digits()
    decode = Decode(options.size, 3) if options.data else Decode(8, 1)
    augment = Augment(max(1, options.size // 16), mirror=True) if options.data else Augment(1)
    source = Throttled(images, options.bandwidth * 1e6, options.latency / 1e3)
    mesh, disk = start_workers(options.workers), None
    if options.cache:
        made = stamp(source, decode if options.holds == "samples" else None)
        disk = Disk(options.cache, made, options.disk_limit * 1e6)
    # A cache for each worker: on a cluster each is in the memory of another node.
    levels = {"disk": disk, "memory_limit": options.memory_limit * 1e6}
    caches = [DataCache(source, decode, **levels) for _ in range(options.workers)]
    alike = {"workers": options.workers, "batch": options.batch // options.workers}
    alike |= {"seed": options.seed, "augment": augment, "threads": options.threads}
    loaders = [Loader(cache, worker=worker, **alike) for worker, cache in enumerate(caches)]
    steps = loaders[0].steps

    model = Classifier(len(images.classes))

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    schedule = optax.cosine_decay_schedule(options.lr, options.epochs * steps)
    tx = optax_ext.sparse_adamw(schedule, density=options.density, axis="data")
    zeros = np.zeros((options.batch, *decode.shape), np.float32)
    init = jax.jit(lambda: model.init(jax.random.key(options.seed), zeros[:1])["params"])
    step = optax_ext.make_train_step(loss_fn, tx, mesh)
    # Compiles before the first epoch; the state is thrown away.
    nothing = {"image": zeros, "label": np.zeros(options.batch, np.int32)}
    jax.block_until_ready(step(init(), optax_ext.init_state(tx, init(), mesh), nothing))
    params = init()
    opt_state = optax_ext.init_state(tx, params, mesh)

    say(*COLUMNS)
    before = Counter()
    for epoch in range(options.epochs):
        start, waited, losses = time.perf_counter(), 0.0, []
        parts = zip(*(loader.epoch(epoch) for loader in loaders))
        for _ in range(steps):
            asked = time.perf_counter()
            # In the order of the workers, since the step distributes the rows in it.
            batch = jax.tree.map(lambda *rows: np.concatenate(rows), *next(parts))
            waited += time.perf_counter() - asked
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(loss)
        losses = jax.device_get(losses)
        seconds = time.perf_counter() - start
        after = sum((cache.counts for cache in caches), Counter())
        done, before = after - before, after
        read = sum(done[name] for name in FROM.values())
        say(
            epoch + 1,
            f"{options.batch * steps / seconds:,.0f}",
            f"{waited / seconds:.0%}",
            *(f"{done[name] / read:.1%}" for name in FROM.values()),
            f"{done['source_bytes'] / 1e6:,.2f}",
            f"{sum(cache.memory_bytes for cache in caches) / 1e6:,.2f}",
            f"{disk.bytes / 1e6:,.2f}" if disk else "-",
            f"{np.mean(losses):.4f}",
        )
    if disk and disk.damaged:
        print(f"{disk.damaged:,} damaged entries were fetched again", file=sys.stderr)
    if not options.data:
        test = jax.tree.map(lambda *rows: np.stack(rows), *map(decode, Digits(test=True)))
        logits = model.apply({"params": jax.device_get(params)}, test["image"])
        right = np.argmax(logits, axis=-1) == test["label"]
        print(f"test accuracy {np.mean(right):.2%}")


def say(*cells) -> None:
    """Prints a row of the table."""
    print("  ".join(f"{x:>{max(7, len(name))}}" for x, name in zip(cells, COLUMNS)), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    parser = parser_of("Train from a slow source, through a cache.")
    add, inf = numbers_of(parser), float("inf")
    parser.add_argument("--data", type=Path, metavar="DIR", help="images as DIR/<class>/<name>.jpg")
    add("--size", int, 96, 1, 4096, "pixels to which the images of --data are scaled")
    add("--bandwidth", float, 1.0, 1e-6, inf, "MB/s of the source; inf: as it is")
    add("--latency", float, 5.0, 0, 1e6, "milliseconds of each read from the source")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="folder of the disk level")
    held = {"choices": ("records", "samples"), "default": "records"}
    parser.add_argument("--holds", **held, help="what the disk level holds (records)")
    add("--disk-limit", float, inf, 0, inf, "MB of the disk level")
    add("--memory-limit", float, inf, 0, inf, "MB of each worker's memory level; 0: none")
    add("--threads", int, 4, 0, 256, "batches that each worker reads at once")
    add("--workers", int, 4, 1, 64, "simulated workers")
    add("--epochs", int, 4, 1, 10**6, "epochs")
    add("--batch", int, 64, 1, 10**7, "images in a batch of all workers together")
    add("--lr", float, 0.003, 1e-9, 1e3, "peak of the learning rate of sparse_adamw")
    add("--density", float, 0.05, 1e-6, 1.0, "of sparse_adamw")
    add("--seed", int, 0, 0, 2**31 - 1, "of parameters, order and augmentation")
    options = parser.parse_args(argv)
    check_batch(parser, options)
    try:
        train(options)
    except (InputError, CacheError) as error:
        print(f"train_cached.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
