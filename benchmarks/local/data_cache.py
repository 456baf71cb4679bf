"""Samples per second from a throttled source, through DataCache and without it.

    python -m benchmarks.local.data_cache [--bandwidth 8] [--latency 2] [--rounds 3] [--json FILE]

JPEG images in a folder stand for the central storage, at the end of a link with a limited bandwidth
and a latency. A contestant reads three epochs of them, decoded to `--size` and augmented, in
batches, and one more in a new process. Before that one the system drops the cached files from its
memory, if it supports this. Contestants take turns in each round. Their samples per second are
divided by the first epoch without a cache in the same round: the table gives the median, the least
and the most. Memory is what the process has beyond the process without a cache.
"""

import functools
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from examples.data_cache.cache import DataCache, Loader
from examples.data_cache.disk import Disk, stamp
from examples.data_cache.images import Augment, Decode, ImageFolder, Throttled

from .._common import options, reports, timing
from .._common.display import show_rows
from .._common.processes import in_new_process

BASE = "no cache"
# By name: whether there is a memory level, and the content of the disk level.
LEVELS = {
    BASE: (False, None),
    "disk level alone": (False, "records"),
    "DataCache": (True, "records"),
    "DataCache, samples on disk": (True, "samples"),
}
# With two alternatives that a program could use without a library.
CONTESTANTS = (*LEVELS, "records in a dictionary", "samples in a dictionary")
EPOCHS, RESTART = (0, 1, 2), 3
CLASSES, PIXELS, QUALITY = 4, 512, 85


class Sequence:
    """A sequence of ``read(index)``."""

    def __init__(self, read, count):
        self.read, self.count = read, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.read(index)


def samples_of(name, source, prepare, folder):
    """The sequence of samples of a contestant, and its disk level or None."""
    count = len(source)
    if name == "samples in a dictionary":
        return Sequence(functools.cache(lambda index: prepare(source[index])), count), None
    if name == "records in a dictionary":
        # As an operating system keeps the local files that it has read.
        record = functools.cache(source.__getitem__)
        return Sequence(lambda index: prepare(record(index)), count), None
    in_memory, holds = LEVELS[name]
    made = stamp(source, prepare if holds == "samples" else None)
    disk = Disk(folder, made) if holds else None
    limit = np.inf if in_memory else 0
    return DataCache(source, prepare, disk=disk, memory_limit=limit), disk


def process(given):
    """Speeds of the epochs of one contestant, and the bytes in memory and on disk at the end."""
    images = ImageFolder(Path(given["images"]))
    decode = Decode(given["size"])
    limits = {name: given[name] for name in ("bytes_per_second", "latency")}
    source = Throttled(images, **limits)
    samples, disk = samples_of(given["contestant"], source, decode, Path(given["cache"]))
    loading = {name: given[name] for name in ("batch", "seed", "threads")}
    loading |= {"worker": 0, "workers": 1}
    loader = Loader(samples, augment=Augment(shift=given["size"] // 16, mirror=True), **loading)
    # Loads threads, decoders and modules before the first epoch, without a sample of the cache.
    record = images[0]
    for _ in Loader(Sequence(lambda _: decode(record), 2 * given["batch"]), **loading).epoch(0):
        pass
    rates = {}
    for number in given["epochs"]:
        start = time.perf_counter()
        count = sum(len(batch["label"]) for batch in loader.epoch(number))
        rates[number] = count / (time.perf_counter() - start)
    found = {"resident": resident_bytes(), "disk": 0}
    if disk is not None:
        disk.close()
        found["disk"] = disk.bytes
    return rates, found


def resident_bytes():
    """The bytes that this process has in memory; 0 if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def write_images(folder, count, seed):
    """Writes smooth, noisy JPEG images in folders of classes; returns their bytes."""
    rng = np.random.default_rng(seed)
    total = 0
    for number in range(count):
        colours = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        image = Image.fromarray(colours).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
        noisy = np.asarray(image) + rng.normal(0, 6, (PIXELS, PIXELS, 3))
        path = folder / f"class_{number % CLASSES}" / f"{number:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        pixels = np.clip(noisy, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, "JPEG", quality=QUALITY)
        total += path.stat().st_size
    return total


def run(given):
    """The result of :func:`process` in a process of its own."""
    return in_new_process(process, given)


def drop_pages(folder):
    """Asks the system to drop the files in a folder from its memory."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(images, args):
    """One list for each contestant, with an entry for each round."""
    found = {name: [] for name in CONTESTANTS}
    given = {name: getattr(args, name) for name in ("size", "batch", "threads")}
    given |= {"bytes_per_second": args.bandwidth * 1e6, "latency": args.latency / 1e3}
    for turn, name in timing.turns(CONTESTANTS, args.rounds):
        options.say(f"round {turn + 1} of {args.rounds}, {name}")
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            own = given | {"contestant": name, "images": str(images), "seed": turn}
            own["cache"] = str(Path(folder) / "cache")
            rates, end = run(own | {"epochs": EPOCHS})
            drop_pages(Path(folder))
            again, _ = run(own | {"epochs": [RESTART]})
        found[name].append({"rates": rates | again, "end": end})
    return found


def summary(found):
    """Rows of the table: ratios with their least and most, and bytes."""

    def spread(values):
        return [statistics.median(values), min(values), max(values)]

    rows = []
    for name, rounds in found.items():
        row, pairs = {"contestant": name}, list(zip(rounds, found[BASE], strict=True))
        for number in (*EPOCHS, RESTART):
            ratios = [one["rates"][number] / base["rates"][EPOCHS[0]] for one, base in pairs]
            row[f"epoch {number + 1}"] = spread(ratios)
        added = [one["end"]["resident"] - base["end"]["resident"] for one, base in pairs]
        row |= {"added_memory": spread(added), "disk": rounds[0]["end"]["disk"]}
        rows.append(row)
    return rows


@options.program
def main(argv=None):
    """Measures, prints the table, and writes it as JSON if asked to."""
    counted = {"size": (96, "pixels of a sample"), "batch": 32}
    counted |= {"threads": (8, "batches read at once"), "rounds": 3, "seed": 0}
    source = {"bandwidth": (8.0, "MB/s of the source"), "latency": (2.0, "ms of each read")}
    folder = (None, "on the local disk, for images and caches (the system's)")
    parser = options.parser_of(__doc__, "json", **counted, **source, folder=folder)
    parser.add_argument("--images", type=options.at_least_one, default=512)
    args = parser.parse_args(argv)
    if args.batch > args.images:
        raise options.InputError(f"--batch {args.batch} is more than --images {args.images}")
    if args.folder is not None and not args.folder.is_dir():
        raise options.InputError(f"--folder {args.folder} is not a folder")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        total = write_images(Path(folder), args.images, args.seed)
        found = measure(Path(folder), args)
    rows = summary(found)
    print(
        f"{args.images} images of {total / args.images / 1e3:.1f} kB, {args.bandwidth:g} MB/s and "
        f"{args.latency:g} ms; no cache: "
        f"{statistics.median(one['rates'][0] for one in found[BASE]):.0f} samples/s"
    )
    show_rows("rates as ratios to the first epoch without a cache, and bytes", rows)
    given = {**vars(args), "folder": None, "json": None}
    reports.write(args.json, {"options": given, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
