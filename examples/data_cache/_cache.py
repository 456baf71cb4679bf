"""The two levels as one sequence of prepared samples."""

import contextlib
import threading
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from flax import serialization

from ._disk import Disk, Entry, stamp
from ._errors import CacheError
from ._memory import Memory, Sample, read_only
from ._sources import Source


class Prepare(Protocol):
    """What is done to a record once, whatever the epoch: it must be deterministic.

    Attributes:
      identity: one line that changes whenever the result does.
    """

    identity: str

    def __call__(self, record: bytes) -> Sample:
        """The sample, as arrays by name; raises ValueError or OSError for a bad record."""


class Counts(NamedTuple):
    """What a cache did; the difference of two says it of the time between them.

    Attributes:
      memory_hits: samples from the memory level.
      disk_hits: samples from the disk level.
      source_reads: samples from the source.
      source_bytes: of their records.
      damaged: entries of the disk level that were not as written, and were fetched again.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    source_reads: int = 0
    source_bytes: int = 0
    damaged: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(self, other)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(self, other)))

    @property
    def samples(self) -> int:
        """All samples that were read."""
        return self.memory_hits + self.disk_hits + self.source_reads


class DataCache:
    """DataCache of Shi et al. (2020), Section 4.1, for the share of one worker.

    A sequence of prepared samples, which grain takes as a data source. It caches what it is asked
    for, and a worker asks for its own share (`Loader`), so that each holds its part of the data.
    Any number of threads may read from it. Processes share the disk level and not the memory.

    A sample is a dictionary of arrays, which are read-only.
    """

    def __init__(
        self,
        source: Source,
        prepare: Prepare,
        *,
        memory: Memory | None = None,
        disk: Disk | None = None,
    ):
        """Puts the levels in front of a source.

        Args:
          source: where a sample comes from the first time.
          prepare: makes a sample of a record.
          memory: the memory level; None: one without a limit.
          disk: the disk level, made with ``stamp(source, holds, prepare)``, which several caches
            may share; None: there is none. In the paper it holds records: the local file system
            caches what was read, and the memory what was prepared. Records of compressed images
            are smaller than samples and fit any preparation; samples save its time in the next
            run.

        Raises:
          CacheError: the disk level is of another source or preparation.
        """
        if disk is not None and disk.stamp != stamp(source, disk.stamp["holds"], prepare):
            raise CacheError(f"the disk level in {disk.folder} is of another source or preparation")
        self._source, self._prepare = source, prepare
        self._samples_on_disk = disk is not None and disk.stamp["holds"] == "samples"
        self._memory = Memory() if memory is None else memory
        self._disk = disk
        self._counts = Counts()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of samples, of all shares."""
        return len(self._source)

    @property
    def counts(self) -> Counts:
        """What it did until now."""
        return self._counts

    @property
    def memory_bytes(self) -> int:
        """Bytes of the samples in memory."""
        return self._memory.bytes

    def __getitem__(self, index: int) -> Sample:
        """A sample from the nearest level that has it; those above it have it afterwards.

        Raises:
          CacheError: the source cannot be read, or holds what cannot be prepared.
        """
        index = range(len(self))[index]
        sample = self._memory.get(index)
        if sample is not None:
            self._count(Counts(memory_hits=1))
            return sample
        entry = Entry(None) if self._disk is None else self._disk.get(index)
        if entry.payload is None:
            sample = self._from_source(index, entry.damaged)
        else:
            sample = self._from_entry(index, entry.payload)
        self._memory.put(index, sample)
        return sample

    def __getitems__(self, indices: Iterable[int]) -> list[Sample]:
        """The samples of a batch; a thread that ends afterwards leaves nothing open."""
        with self._disk.session() if self._disk is not None else contextlib.nullcontext():
            return [self[index] for index in indices]

    def _from_entry(self, index: int, payload: bytes) -> Sample:
        if self._samples_on_disk:
            sample = read_only(serialization.msgpack_restore(payload))
        else:
            sample = self._prepared(index, payload)
        self._count(Counts(disk_hits=1))
        return sample

    def _from_source(self, index: int, damaged: bool) -> Sample:
        record = self._source[index]
        sample = self._prepared(index, record)
        self._count(Counts(source_reads=1, source_bytes=len(record), damaged=int(damaged)))
        # After the preparation, so that a record that is no good is not kept.
        if self._disk is not None and not self._disk.full:
            if self._samples_on_disk:
                record = serialization.msgpack_serialize(sample)
            self._disk.put(index, record)
        return sample

    def _prepared(self, index: int, record: bytes) -> Sample:
        try:
            return read_only(self._prepare(record))
        except (ValueError, OSError) as error:
            raise CacheError(f"cannot prepare {self._source.where(index)}: {error}") from error

    def _count(self, more: Counts) -> None:
        with self._lock:
            self._counts += more

    def __reduce__(self):
        raise TypeError(
            "a DataCache belongs to one process: read it by threads (grain.ReadOptions), and not "
            "by processes (mp_prefetch)"
        )
