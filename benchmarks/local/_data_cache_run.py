"""One process of :mod:`.data_cache`: some epochs of one contestant, reported in JSON lines."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from examples.data_cache.cache import DataCache, Loader
from examples.data_cache.disk import Disk, stamp
from examples.data_cache.images import Augment, Decode, ImageFolder, Throttled

# By name: whether there is a memory level, and what the disk level holds.
LEVELS = {
    "no cache": (False, None),
    "disk level alone": (False, "records"),
    "DataCache": (True, "records"),
    "DataCache, samples on disk": (True, "samples"),
}
# What a program would do without a library.
DICTIONARIES = ("records in a dictionary", "samples in a dictionary")
CONTESTANTS = (*LEVELS, *DICTIONARIES)


class Dictionary:
    """What a function of an index returned, kept without a limit."""

    def __init__(self, read, count):
        self.read, self.count, self.kept = read, count, {}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        found = self.kept.get(index)
        if found is None:
            found = self.kept[index] = self.read(index)
        return found


class Prepared:
    """A sequence of samples, prepared at each reading."""

    def __init__(self, records, prepare):
        self.records, self.prepare = records, prepare

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.prepare(self.records[index])


def samples_of(name, source, prepare, folder):
    """The sequence of samples of a contestant, and its disk level or None."""
    if name == "samples in a dictionary":
        return Dictionary(lambda index: prepare(source[index]), len(source)), None
    if name == "records in a dictionary":
        return Prepared(Dictionary(source.__getitem__, len(source)), prepare), None
    in_memory, holds = LEVELS[name]
    made = stamp(source, prepare if holds == "samples" else None)
    disk = Disk(folder, made) if holds else None
    limit = np.inf if in_memory else 0
    return DataCache(source, prepare, disk=disk, memory_limit=limit), disk


def resident_bytes():
    """What this process has in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(given):
    """Runs the epochs that `given` asks for."""
    source = Throttled(
        ImageFolder(Path(given["images"])),
        bytes_per_second=given["bytes_per_second"],
        latency=given["latency"],
    )
    decode = Decode(given["size"])
    samples, disk = samples_of(given["contestant"], source, decode, Path(given["cache"]))
    loading = {
        "worker": 0,
        "workers": 1,
        "batch": given["batch"],
        "seed": given["seed"],
        "threads": given["threads"],
    }
    augment = Augment(shift=given["size"] // 16, mirror=True)
    loader = Loader(samples, augment=augment, **loading)
    # Threads, decoders and modules that load when first used, without a sample of the cache.
    record = ImageFolder(Path(given["images"]))[0]
    for _ in Loader(Prepared([record] * 2 * given["batch"], decode), **loading).epoch(0):
        pass
    for number in given["epochs"]:
        start = time.perf_counter()
        count = sum(len(batch["label"]) for batch in loader.epoch(number))
        seconds = time.perf_counter() - start
        print(json.dumps({"event": "epoch", "number": number, "rate": count / seconds}), flush=True)
    counts = dict(samples.counts) if isinstance(samples, DataCache) else {}
    found = {"resident": resident_bytes(), "counts": counts}
    found["memory"] = samples.memory_bytes if isinstance(samples, DataCache) else 0
    if disk is not None:
        disk.close()
        found["disk"] = disk.bytes
    print(json.dumps({"event": "end", **found}, default=np.ndarray.tolist), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
