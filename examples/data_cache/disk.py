"""The disk level: bytes by index in one file of SQLite, by diskcache.

Each entry is a transaction: it appears as a whole or not at all, also if the process is killed.
Later changes are found by a checksum, which includes the index and the identity of the cache.
"""

import json
import sqlite3
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import diskcache

_ERRORS = (OSError, sqlite3.Error, diskcache.Timeout)
# Each value is a field of the database (SQLite's largest has 1e9 bytes), so that no file can be
# left over. Nothing is evicted, and the process needs at most 4 MB more.
_SETTINGS = {"disk_min_file_size": 2**30, "eviction_policy": "none", "cull_limit": 0}
_SETTINGS |= {"size_limit": 2**62, "sqlite_cache_size": 1024, "sqlite_mmap_size": 0}


class CacheError(ValueError):
    """A source, a cache or an option is wrong; the message is one line for the user."""


def stamp(source: Any, prepare: Any = None) -> dict[str, Any]:
    """The identity of a cache: records of `source`, or samples that `prepare` makes of them."""
    entries = "records" if prepare is None else f"samples, {prepare.identity}"
    return {"format": 2, "source": source.identity, "size": len(source), "entries": entries}


class Disk:
    """A folder with an entry for each index; threads and processes may share it.

    If the limit in bytes is reached, or the disk is full, it prints one line, keeps its entries and
    accepts no more. `damaged` counts the entries that have changed since they were written.
    """

    def __init__(self, folder: Path, stamp: dict[str, Any], limit: float = float("inf")):
        """Opens a folder that is new, empty, or has a cache of the same stamp; else CacheError."""
        self.folder, self.stamp, self.limit = folder, stamp, limit
        self.damaged, self.full, self._lock = 0, False, threading.Lock()
        self._seed = zlib.crc32(json.dumps(stamp).encode())
        try:
            self._entries = _opened(folder, stamp)
        except _ERRORS as error:
            what = "make room for it, or give another folder"
            raise CacheError(f"cannot open the cache in {folder} ({error}): {what}") from error

    def get(self, index: int) -> bytes | None:
        """The payload of `index`; None if there is none, or if it is damaged."""
        try:
            entry = self._entries.get(index)
        except _ERRORS:
            entry = b""
        if entry is None or entry[:4] == self._checksum(index, entry[4:]):
            return entry and entry[4:]
        with self._lock:
            self.damaged += 1
        return None

    def put(self, index: int, payload: bytes) -> None:
        """Writes an entry, instead of an older one, if there is room."""
        entry = self._checksum(index, payload) + payload
        with self._lock:  # SQLite sleeps while another thread writes, and waiting is quicker
            try:
                if not self.full and self._entries.volume() + len(entry) > self.limit:
                    raise OSError(f"its limit of {self.limit:,.0f} bytes is reached")
                if not self.full:
                    self._entries.set(index, entry)
            except _ERRORS as error:
                self.full = True
                why = f"cannot write to {self.folder} any more ({error or 'locked'})"
                print(f"data_cache: {why}; keeping what it holds", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Closes the file in this thread; the next use opens it again."""
        self._entries.close()

    def _checksum(self, index: int, payload: bytes) -> bytes:
        return zlib.crc32(payload, self._seed ^ index).to_bytes(4, "little")

    @property
    def bytes(self) -> int:
        """The size of the folder on the disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


class _OnlyBytes(diskcache.Disk):
    def fetch(self, mode, filename, value, read):
        """The bytes of a field; data that someone else may have pickled is a damaged entry."""
        return value if mode == diskcache.core.MODE_RAW and isinstance(value, bytes) else b""


def _opened(folder: Path, stamp: dict[str, Any]) -> diskcache.Cache:
    """The entries, stamped if they are new, and compared with the stamp if they are not."""
    if any(folder.glob("*")) and not (folder / "cache.db").is_file():
        raise CacheError(f"{folder} is not empty, and no cache: give an empty folder")
    entries = diskcache.Cache.__new__(diskcache.Cache)
    try:
        entries.__init__(str(folder), disk=_OnlyBytes, **_SETTINGS)
        # An empty file is new, since a stamp is written before any entry.
        if len(entries) == 0:
            entries.add("stamp", json.dumps(stamp).encode())
        try:
            found = dict(json.loads(entries.get("stamp", b"")))
        except (TypeError, ValueError):
            found = {}
    finally:
        entries.close()  # also if it could not be opened
    for name, value in stamp.items():
        if found.get(name) != value:
            what = f"another {name} ({found.get(name)!r}; this run has {value!r})"
            raise CacheError(f"{folder} holds a cache of {what}: give another folder")
    return entries
