"""Both levels as one sequence of prepared samples, and batches of a worker's share of it."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import grain
import numpy as np
from flax import serialization

from .disk import CacheError, Disk, stamp


class DataCache:
    """Samples by index, each from the nearest level that has it, and kept in those above.

    It holds the samples that were requested: a worker requests its own share (`Loader`), from any
    number of threads. Nothing is evicted: an epoch reads each sample once, so the sample just read
    is the last to come again. Processes share the disk level and not the memory.
    """

    def __init__(self, source, prepare, *, disk: Disk | None = None, memory_limit: float = np.inf):
        """Puts the levels between a source and its users.

        Args:
          source: a sequence of records, as bytes, that threads may read concurrently; `identity`
            changes with any of them, `names[index]` is for messages.
          prepare: ``prepare(record) -> sample``, deterministic; `identity` changes with the result.
            Both raise ValueError or OSError for a bad record.
          disk: may be shared by caches; a CacheError if its source or preparation differs. In the
            paper it holds records; samples save the preparation in the next run.
          memory_limit: bytes of samples in memory; 0: no memory level.
        """
        self._samples_on_disk = disk is not None and disk.stamp["entries"] != "records"
        of = prepare if self._samples_on_disk else None
        if disk is not None and disk.stamp != stamp(source, of):
            raise CacheError(f"the disk level in {disk.folder} is of another source or preparation")
        self._source, self._prepare, self._disk = source, prepare, disk
        self._samples, self.memory_bytes, self._limit = {}, 0, memory_limit
        # memory_hits, disk_hits, source_reads and source_bytes.
        self.counts, self._lock = Counter(), threading.Lock()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """A sample of read-only arrays; a CacheError if it can't be read or prepared."""
        index = range(len(self))[index]
        if (sample := self._samples.get(index)) is not None:
            with self._lock:
                self.counts["memory_hits"] += 1
            return sample
        held = None if self._disk is None else self._disk.get(index)
        restore = self._samples_on_disk and held is not None
        try:
            record = self._source[index] if held is None else held
            sample = serialization.msgpack_restore(held) if restore else self._prepare(record)
        except (ValueError, OSError) as error:
            raise CacheError(f"cannot prepare {self._source.names[index]}: {error}") from error
        sample = {name: np.asarray(value) for name, value in sample.items()}
        for array in sample.values():
            array.setflags(write=False)  # it comes again
        if held is None and self._disk is not None:  # not before: a bad record is not kept
            kept = serialization.msgpack_serialize(sample) if self._samples_on_disk else record
            self._disk.put(index, kept)
        read = {"source_reads": 1, "source_bytes": len(record)}
        size = sum(array.nbytes for array in sample.values())
        with self._lock:
            self.counts.update(read if held is None else {"disk_hits": 1})
            if index not in self._samples and self.memory_bytes + size <= self._limit:
                self._samples[index] = sample
                self.memory_bytes += size
        return sample

    def __getitems__(self, indices: list[int]) -> list:
        """The samples of a batch; leaves no file open, since the thread may end afterwards."""
        try:
            return [self[index] for index in indices]
        finally:
            if self._disk is not None:
                self._disk.close()


class Loader:
    """Batches of a worker, which has every P-th sample, the same in all epochs, in a new order."""

    def __init__(self, samples, *, worker, workers, batch, seed, augment=None, threads=8):
        """Makes the batches of `worker`, 0 to P - 1, of the `samples` of all P workers.

        ``augment(sample, random) -> sample`` gets new random numbers in each epoch. `threads`
        batches are read at once; 0: on request. A CacheError if the share has no whole batch.
        """
        share = len(samples) // workers  # the same for all: they take their steps together
        if not (0 <= worker < workers and 0 < batch <= share):
            raise CacheError(f"a batch of {batch} of {share} samples, worker {worker} of {workers}")

        def read(indices: list[int], random: np.random.Generator) -> dict[str, np.ndarray]:
            many = getattr(samples, "__getitems__", lambda some: [samples[index] for index in some])
            chosen = [augment(x, random) if augment else x for x in many(indices)]  # not cached
            return {name: np.stack([x[name] for x in chosen]) for name in chosen[0]}

        # Indices are put into batches, and a batch reads its samples, since grain takes longer to
        # pass on a sample than the memory level takes to find it.
        data = grain.MapDataset.range(len(samples))[worker::workers].shuffle(seed=seed)
        data = data.batch(batch, drop_remainder=True, batch_fn=list)
        # Each worker has its own seed, or all of them would augment alike.
        own_seed = int(np.random.SeedSequence((seed, worker)).generate_state(1)[0])
        self._data, self.steps = data.random_map(read, seed=own_seed), share // batch
        self._reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)

    def epoch(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        """The batches of an epoch, from 0, always the same, without a last partial batch."""
        first = number * len(self._data)
        batches = self._data.repeat()[first : first + self.steps]
        with contextlib.closing(iter(batches.to_iter_dataset(self._reading))) as reader:
            yield from reader
