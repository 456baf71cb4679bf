"""Samples per second from a throttled source, through DataCache and without it.

    python -m benchmarks.local.data_cache [--bandwidth 8] [--latency 2] [--rounds 3] [--json FILE]

JPEG images of 512x512 in a folder stand for the central storage, behind a link with a rate and a
latency. A contestant reads three epochs of them, decoded to `--size` and augmented, in batches,
and one more in a new process. Contestants take turns in each round, and a rate is divided by that
of the first epoch without a cache in the same round: the table gives the median, the least and
the most. Memory is that of the process beyond the one without a cache.

"records in a dictionary" keeps files as they are read, as an operating system does with local
ones; "samples in a dictionary" is the memory level and nothing else. Before the new process, the
files of the cache are dropped from the memory of the system, where it lets one.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from .._common import options, processes, reports
from .._common.display import show
from ._data_cache_run import CONTESTANTS

BASE = "no cache"
EPOCHS = (0, 1, 2)
RESTART = 3
CLASSES, PIXELS, QUALITY = 4, 512, 85
_SECONDS = 3600


def write_images(folder, count, seed):
    """JPEG images of smooth colours and noise, in folders of classes; returns their bytes."""
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
    """The rates of the epochs of one process, by number, and what it said at the end."""
    command = [sys.executable, "-m", "benchmarks.local._data_cache_run", json.dumps(given)]
    with processes.started([command]) as (process,):
        end = process.wait_for("end", seconds=_SECONDS)
        return {e["number"]: e["rate"] for e in process.events if e["event"] == "epoch"}, end


def drop_pages(folder):
    """Asks the system to forget what it holds of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(images, args):
    """One list for each contestant, with an entry for each round."""
    found = {name: [] for name in CONTESTANTS}
    for turn in range(args.rounds):
        first = turn % len(CONTESTANTS)
        for name in CONTESTANTS[first:] + CONTESTANTS[:first]:
            options.say(f"round {turn + 1} of {args.rounds}, {name}")
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                given = {
                    "contestant": name,
                    "images": str(images),
                    "cache": str(Path(folder) / "cache"),
                    "bytes_per_second": args.bandwidth * 1e6,
                    "latency": args.latency / 1e3,
                    "size": args.size,
                    "batch": args.batch,
                    "threads": args.threads,
                    "seed": turn,
                }
                rates, end = run(given | {"epochs": EPOCHS})
                drop_pages(Path(folder))
                again, end_again = run(given | {"epochs": [RESTART]})
            found[name].append(
                {"rates": rates | again, "end": end, "counts_restart": end_again["counts"]}
            )
    return found


def summary(found):
    """Rows of the table: ratios with their least and most, and bytes."""
    rows = []
    for name, rounds in found.items():
        bases = [one["rates"][EPOCHS[0]] for one in found[BASE]]
        plain = [one["end"]["resident"] for one in found[BASE]]
        row = {"contestant": name}
        for number in (*EPOCHS, RESTART):
            ratios = [one["rates"][number] / base for one, base in zip(rounds, bases)]
            row[f"epoch {number + 1}"] = spread(ratios)
        row["second to first"] = spread([one["rates"][1] / one["rates"][0] for one in rounds])
        added = [one["end"]["resident"] - base for one, base in zip(rounds, plain)]
        row["added_memory"] = spread(added)
        row["samples_in_memory"] = rounds[0]["end"]["memory"]
        row["disk"] = rounds[0]["end"].get("disk", 0)
        rows.append(row)
    return rows


def spread(values):
    """Median, least and most."""
    return [statistics.median(values), min(values), max(values)]


def cells(row):
    """Those of a line of the table."""

    def ratio(name):
        return "{:.2f} ({:.2f}-{:.2f})".format(*row[name])

    return [
        row["contestant"],
        *(ratio(f"epoch {number + 1}") for number in (*EPOCHS, RESTART)),
        ratio("second to first"),
        f"{row['added_memory'][0] / 1e6:.0f}",
        f"{row['disk'] / 1e6:.1f}",
    ]


@options.program
def main(argv=None):
    """Measures, prints the table, and writes it as JSON if asked to."""
    parser = options.parser_of(__doc__)
    add = parser.add_argument
    add("--images", type=options.at_least_one, default=512, help="how many (512)")
    add("--size", type=options.at_least_one, default=96, help="pixels of a sample (96)")
    add("--bandwidth", type=options.positive, default=8.0, help="MB/s of the source (8)")
    add("--latency", type=options.positive, default=2.0, help="ms of each read (2)")
    add("--batch", type=options.at_least_one, default=32)
    add("--threads", type=options.at_least_one, default=8, help="batches read at once (8)")
    add("--rounds", type=options.at_least_one, default=3)
    add(
        "--folder",
        type=Path,
        help="a folder on the local disk, for images and caches (the system's)",
    )
    add("--seed", type=int, default=0)
    options.add_outputs(parser)
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
    head = ("contestant", "epoch 1", "epoch 2", "epoch 3", "restart", "2nd to 1st", "MB", "disk MB")
    show("rates as ratios to the first epoch without a cache", head, [cells(row) for row in rows])
    reports.write(
        args.json, {"options": {**vars(args), "folder": None, "json": None}, "rows": rows}
    )


if __name__ == "__main__":
    sys.exit(main())
