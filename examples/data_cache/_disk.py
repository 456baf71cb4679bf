"""The disk level: bytes by index in one file of SQLite, by diskcache.

What is written appears as a whole or not at all, also when the process is ended in the middle,
because every entry is a transaction. What the disk loses or changes afterwards is found by the
checksum of each entry, which includes its index and what the cache is of.
"""

import contextlib
import functools
import json
import os
import shutil
import sqlite3
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import diskcache

from ._errors import CacheError

FORMAT = 1
_STAMP, _ENTRIES = "data_cache.json", "entries"
# Of the payload, and of stamp, index and payload.
_HEADER = struct.Struct("<QI")
_FIELDS = {
    "format": "format",
    "holds": "kind of entries",
    "source": "source",
    "samples": "number of samples",
    "prepare": "preparation",
}
# Of diskcache: each value is a field of the database (SQLite's largest has 1e9 bytes), so that
# no file can be left over; nothing is evicted; and it adds no more than 4 MB to the process.
_SETTINGS = {
    "disk_min_file_size": 2**30,
    "eviction_policy": "none",
    "cull_limit": 0,
    "size_limit": 2**62,
    "sqlite_cache_size": 1024,
    "sqlite_mmap_size": 0,
}


class _OnlyBytes(diskcache.Disk):
    """Reads bytes, and never unpickles what someone else may have put into the folder."""

    def fetch(self, mode, filename, value, read):
        """The bytes of a field."""
        if mode != diskcache.core.MODE_RAW or not isinstance(value, bytes):
            raise sqlite3.DatabaseError("an entry that is not bytes")
        return value


class Entry(NamedTuple):
    """What was found under an index.

    Attributes:
      payload: the bytes, None where there are none.
      damaged: there was an entry, but not the one that was written.
    """

    payload: bytes | None
    damaged: bool = False


class Disk:
    """A folder with an entry for each index; threads and processes may share it.

    When the limit is reached, or the disk is full, it keeps what it has and takes no more, and
    says so in one line: a training goes on. Nothing is evicted, for the reason that `Memory` gives.

    Attributes:
      folder: where it is.
      stamp: what its entries are of.
      limit: bytes, or None.
      full: nothing more is written.
      broken: nothing more is read.
    """

    def __init__(
        self,
        folder: Path,
        stamp: dict[str, Any],
        *,
        limit: int | None = None,
        keep_free: int = 64 * 10**6,
        warn: Callable[[str], None] | None = None,
    ):
        """Opens the folder, or makes it.

        Args:
          folder: on a local disk; new, empty, or with a cache of the same stamp.
          stamp: what the entries are of (:func:`stamp`).
          limit: bytes of the entries; None: as much as the disk has.
          keep_free: bytes of the disk that are left to others. Opening the file again takes some
            of it, up to 4 MB for what SQLite has not moved to its place.
          warn: takes the one line when no more can be written, or read; None: standard error does.

        Raises:
          CacheError: the folder cannot be used, or holds something else. It is left as it is.
        """
        self.folder, self.stamp, self.limit = folder, stamp, limit
        self.full = self.broken = False
        self._keep_free = keep_free
        self._warn = warn or functools.partial(print, file=sys.stderr, flush=True)
        _claim(folder, stamp)
        self._seed = zlib.crc32(json.dumps(stamp, sort_keys=True).encode())
        # Of what is written: SQLite sleeps while another thread writes, and waiting is quicker.
        self._writing = threading.Lock()
        try:
            self._entries = _open(folder / _ENTRIES)
        except (OSError, sqlite3.Error) as error:
            raise CacheError(
                f"cannot open the cache in {folder} ({error}): make room and access for it, or "
                "delete the folder"
            ) from error

    def __len__(self) -> int:
        """The number of entries."""
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """What the folder takes of the disk."""
        return sum(path.stat().st_size for path in (self.folder / _ENTRIES).glob("*"))

    def get(self, index: int) -> Entry:
        """What was put under `index`; an entry that is not as it was written is damaged."""
        if self.broken:
            return Entry(None)
        try:
            entry = self._entries.get(index)
        except (OSError, sqlite3.Error, diskcache.Timeout) as error:
            self._give_up(
                f"cannot read the cache in {self.folder} any more ({error}); going on from the "
                "source. Delete the folder before the next run",
                broken=True,
            )
            return Entry(None, damaged=True)
        if entry is None:
            return Entry(None)
        payload = entry[_HEADER.size :]
        if entry[: _HEADER.size] != self._header(index, payload):
            return Entry(None, damaged=True)
        return Entry(payload)

    def put(self, index: int, payload: bytes) -> bool:
        """Writes an entry, in the place of an older one; returns whether it was written."""
        if self.full:
            return False
        entry = self._header(index, payload) + payload
        try:
            with self._writing:
                obstacle = self._put(index, entry)
        except (OSError, sqlite3.Error, diskcache.Timeout) as error:
            obstacle = f"cannot write to the cache in {self.folder} ({error or 'locked'})"
        if obstacle:
            self._give_up(
                f"{obstacle}; keeping the entries that it holds, and reading the rest from the "
                "source in each run"
            )
        return not obstacle

    def close(self) -> None:
        """Closes the file in this thread, where it opens again when it is used."""
        self._entries.close()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Closes the file in this thread at the end of the block.

        Each thread opens the file for itself, and those of a loader come and go.
        """
        try:
            yield
        finally:
            self.close()

    def _put(self, index: int, entry: bytes) -> str | None:
        """Writes an entry, or says what stands against it."""
        if self.limit is not None and self._entries.volume() + len(entry) > self.limit:
            return f"the cache in {self.folder} has reached its limit of {self.limit:,} bytes"
        if shutil.disk_usage(self.folder).free < self._keep_free + len(entry):
            return f"the disk of {self.folder} has less than {self._keep_free:,} bytes free"
        self._entries.set(index, entry)
        return None

    def _give_up(self, reason: str, broken: bool = False) -> None:
        with self._writing:  # several threads may find out at once
            known = self.broken if broken else self.full
            self.full, self.broken = True, self.broken or broken
        if not known:
            self._warn(f"data_cache: {reason}")

    def _header(self, index: int, payload: bytes) -> bytes:
        checksum = zlib.crc32(payload, zlib.crc32(index.to_bytes(8, "little"), self._seed))
        return _HEADER.pack(len(payload), checksum)


def _open(folder: Path) -> diskcache.Cache:
    entries = diskcache.Cache.__new__(diskcache.Cache)
    try:
        entries.__init__(str(folder), disk=_OnlyBytes, **_SETTINGS)
    except BaseException:
        entries.close()  # it opens the file first
        raise
    return entries


def stamp(source: Any, holds: str, prepare: Any = None) -> dict[str, Any]:
    """What a cache is of; one with another stamp is refused.

    Args:
      source: has a length and an `identity`.
      holds: "records", as the source has them, or "samples", as `prepare` makes them.
      prepare: has an `identity`. It matters to samples only: records can be prepared in
        another way in the next run.
    """
    if holds not in ("records", "samples"):
        raise CacheError(f"holds is {holds!r}; expected 'records' or 'samples'")
    return {
        "format": FORMAT,
        "holds": holds,
        "source": source.identity,
        "samples": len(source),
        "prepare": prepare.identity if holds == "samples" else None,
    }


def _claim(folder: Path, stamp: dict[str, Any]) -> None:
    """Writes the stamp into a new folder, or compares it with the one that is there."""
    path = folder / _STAMP
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # A stamp that was cut off leaves a part, and no entries.
            if any(not name.startswith(_STAMP) for name in os.listdir(folder)):
                raise CacheError(f"{folder} is not empty, and no cache: give an empty folder")
            part = folder / f"{_STAMP}.{os.getpid()}.part"
            part.write_text(json.dumps(stamp, indent=1) + "\n")
            part.replace(path)
        text = path.read_text()
    except OSError as error:
        raise CacheError(f"cannot use {folder} for a cache: {error.strerror}") from error
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CacheError(f"{path} is damaged: delete {folder}, or give another folder")
    for field, name in _FIELDS.items():
        if found.get(field) != stamp[field]:
            raise CacheError(
                f"{folder} holds a cache of another {name} ({found.get(field)!r}; this run has "
                f"{stamp[field]!r}): delete it, or give another folder"
            )
