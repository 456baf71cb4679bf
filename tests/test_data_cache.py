"""The data cache of the example: the source of a sample, a worker's share, and the training.

Data that are cut off, damaged or foreign are never read as an entry.
"""

import contextlib
import inspect
import json
import os
import pickle
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import diskcache
import numpy as np
import pytest

from data_cache import images
from data_cache.cache import DataCache
from data_cache.disk import CacheError, Disk, stamp

pytestmark = pytest.mark.usefixtures("default_promotion")


class Numbers(list):
    """Records that begin with their index, and a count of how often each was read."""

    def __init__(self, count=12, identity="numbers"):
        super().__init__(index.to_bytes(3000, "little") for index in range(count))
        self.reads, self.identity, self.names = [0] * count, identity, range(count)

    def __getitem__(self, index):
        self.reads[index] += 1
        return super().__getitem__(index)


class Prepare(list):
    """Multiplies the number of a record by ten, and lists the results."""

    def __init__(self, factor=10):
        self.identity, self.factor = f"times {factor}", factor

    def __call__(self, record):
        number = self.factor * int.from_bytes(record[:8], "little")
        self.append(number)
        return {"x": np.full(4, number, np.int32)}


SAMPLE_BYTES = 16
STAMP = {"format": 2, "source": "s", "size": 100, "entries": "records"}


@pytest.fixture
def opened(tmp_path):
    """Makes disk levels in folders by name, with some entries, and closes them."""
    disks = []

    def make(stamp=STAMP, fill=0, name="cache", **options):
        disks.append(Disk(tmp_path / name, stamp, **options))
        for index in range(fill):
            disks[-1].put(index, payload(index))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


def read_all(cache):
    """The counts of the cache while four threads read all samples."""
    before, shares = Counter(cache.counts), [range(i, len(cache), 4) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for share, found in zip(shares, pool.map(cache.__getitems__, shares)):
            expected = np.repeat(10 * np.array(share, np.int32)[:, None], 4, axis=1)
            np.testing.assert_array_equal([x["x"] for x in found], expected, strict=True)
    return cache.counts - before


def from_source(count):
    return Counter(source_reads=count, source_bytes=count * 3000)


@pytest.mark.parametrize(
    ("samples_of", "room", "calls"),
    [(None, 60, (60, 60)), (Prepare(), 60, (60, 0)), (None, 5, (170, 170)), (None, 0, (180, 180))],
)
def test_cache_reads_an_epoch_from_memory_and_another_run_from_disk(
    opened, samples_of, room, calls
):
    """Memory keeps its samples, as far as it has room."""
    source, limit = Numbers(60), room * SAMPLE_BYTES + 1
    for first, prepared in zip((from_source(60), Counter(disk_hits=60)), calls):
        prepare, disk = Prepare(), opened(stamp(source, samples_of))
        cache = DataCache(source, prepare, disk=disk, memory_limit=limit)
        assert read_all(cache) == first
        later = Counter(memory_hits=room, disk_hits=60 - room)
        assert read_all(cache) == read_all(cache) == +later
        assert (len(prepare), cache.memory_bytes) == (prepared, room * SAMPLE_BYTES)
    assert source.reads == [1] * 60
    for sample in (cache[-1], cache[np.int64(2)]):
        with pytest.raises(ValueError, match="read-only"):
            sample["x"] += 1
    with pytest.raises(IndexError):
        cache[60]
    nothing = DataCache(source, Prepare(), memory_limit=0)
    assert read_all(nothing) == read_all(nothing) == from_source(60)


def test_disk_level_of_something_else_is_refused(opened):
    records = opened(stamp(Numbers()))
    samples = opened(stamp(Numbers(), Prepare()), name="samples")
    others = (records, Numbers(identity="x")), (records, Numbers(13)), (samples, Numbers())
    for disk, source in others:
        with pytest.raises(CacheError, match="is of another source or preparation"):
            DataCache(source, Prepare(3), disk=disk)
    read_all(DataCache(Numbers(), Prepare(), disk=records))
    other = DataCache(Numbers(), Prepare(3), disk=records)  # records fit any preparation
    assert (other[5]["x"][0], other.counts) == (15, Counter(disk_hits=1))


# The disk level. An entry is a checksum of 4 bytes and the payload.

DAMAGES = (
    lambda entry: entry[:2500],
    lambda entry: b"",
    lambda entry: entry + b"\0",
    lambda entry: entry[:3000] + bytes([entry[3000] ^ 1]) + entry[3001:],
    lambda entry: bytes(len(entry)),
    lambda entry: bytes([entry[0] ^ 1]) + entry[1:],
)
SET = "UPDATE Cache SET value = ? WHERE key = ?"


def payload(index):
    return bytes([index % 251]) * 5000 + index.to_bytes(4, "little")


def sql(disk, statement, *arguments):
    with contextlib.closing(sqlite3.connect(disk.folder / "cache.db")) as connection, connection:
        return connection.execute(statement, arguments).fetchall()


def entry_of(disk, key):
    return sql(disk, "SELECT value FROM Cache WHERE key = ?", key)[0][0]


def count_of_first(disk, count):
    """How many of the first entries there are; the entries after them must be missing."""
    found = [disk.get(index) for index in range(count)]
    there = sum(entry is not None for entry in found)
    assert found == [payload(i) if i < there else None for i in range(count)]
    assert disk.damaged == 0
    return there


def test_entry_that_is_not_as_written_is_fetched_again_and_counted(opened):
    source = Numbers()
    disk = opened(stamp(source))
    read_all(DataCache(source, Prepare(), disk=disk))
    # The last entry is replaced by another sample's.
    for key, damage in enumerate((*DAMAGES, lambda _: entry_of(disk, 7))):
        sql(disk, SET, damage(entry_of(disk, key)), key)
    again = DataCache(source, Prepare(), disk=disk)
    assert read_all(again) == Counter(disk_hits=5) + from_source(7)
    assert (disk.damaged, source.reads) == (7, [2] * 7 + [1] * 5)
    assert read_all(DataCache(source, Prepare(), disk=disk)) == Counter(disk_hits=12)


def test_entries_of_another_cache_and_what_is_pickled_are_damaged(opened, tmp_path):
    """This holds even if the stamp of the file was changed."""

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "victim"),)

    disk = opened(fill=2)
    sql(disk, SET, json.dumps(STAMP | {"source": "t"}).encode(), "stamp")
    other = opened(STAMP | {"source": "t"})
    assert [other.get(0), other.damaged] == [None, 1]
    pickled = pickle.dumps(Malicious()), diskcache.core.MODE_PICKLE
    for key in (0, "stamp"):
        sql(disk, "UPDATE Cache SET value = ?, mode = ? WHERE key = ?", *pickled, key)
    assert [disk.get(0), disk.get(1), disk.damaged] == [None, payload(1), 1]
    with pytest.raises(CacheError, match="another format"):
        opened()
    assert not (tmp_path / "victim").exists()


# It imports only the disk level: the levels above it take seconds.
CHILD = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(images.__file__).parent)!r})
from disk import Disk
disk = Disk(Path(sys.argv[1]), {STAMP!r})
insert = disk._entries._row_insert
def killed(key, *rest):
    insert(key, *rest)
    if key == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
disk._entries._row_insert = killed
{inspect.getsource(payload)}
for index in range(100):
    disk.put(index, payload(index))
"""


def test_processes_share_a_folder_and_one_that_is_killed_leaves_whole_entries(opened, tmp_path):
    """It ends after a row is inserted and before the transaction is committed."""

    def statuses(*ends):
        program = [sys.executable, "-c", CHILD, str(tmp_path / "cache")]
        return [each.wait(120) for each in [subprocess.Popen([*program, str(x)]) for x in ends]]

    assert statuses(5) == [-signal.SIGKILL]
    assert count_of_first(opened(), 10) == 5
    assert statuses(1000, 1000, 60)[:2] == [0, 0]
    assert count_of_first(opened(), 101) == 100


@pytest.mark.parametrize("keep", [0, 50, 4096, 9000, -1])
def test_cache_file_that_is_cut_off_gives_no_wrong_entry(opened, keep, capsys):
    disk = opened(fill=20)
    disk.close()
    file = disk.folder / "cache.db"
    file.write_bytes(file.read_bytes()[:keep])
    with contextlib.suppress(CacheError):
        disk = opened()
        for index in range(20):
            assert disk.get(index) in (None, payload(index))
            disk.put(index, payload(index))
    assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize(
    ("limit", "why"),
    [(10**5, "its limit of 100,000 bytes is reached"), (10**9, "database or disk is full")],
)
def test_cache_that_is_full_says_so_once_and_keeps_what_it_has(opened, limit, why, capsys):
    """It is full by its limit, or by SQLite's error of a full disk, from a limit of pages.

    An entry that can't be read is missing.
    """
    disk = opened(limit=limit)
    disk._entries._sql("PRAGMA max_page_count = 40")
    for index in range(40):
        disk.put(index, payload(index))
    assert 5 < count_of_first(disk, 40) < 40
    assert disk._entries.volume() <= limit
    said = f"data_cache: cannot write to {disk.folder} any more ({why}); keeping what it holds\n"
    disk._entries.get = Mock(side_effect=sqlite3.OperationalError("disk I/O error"))
    assert (disk.get(0), disk.damaged) == (None, 1)
    assert capsys.readouterr().err == said


def test_cache_or_folder_of_something_else_is_refused_and_left_alone(opened, tmp_path):
    disk = opened(fill=20)
    before = sql(disk, "SELECT key, value FROM Cache")
    for name, value in {"format": 3, "source": "t", "size": 99, "entries": "samples, p"}.items():
        message = f"{disk.folder} holds a cache of another {name} ({STAMP[name]!r}; this run has "
        with pytest.raises(
            CacheError, match=re.escape(f"{message}{value!r}): give another folder")
        ):
            opened(STAMP | {name: value})
    assert sql(disk, "SELECT key, value FROM Cache") == before
    for text in (b"", b'{"format": 2', b"[1]", b"\xff"):
        sql(disk, SET, text, "stamp")
        with pytest.raises(CacheError, match=r"of another format \(None; this run has 2\)"):
            opened()
    file = tmp_path / "work" / "thesis.tex"
    file.parent.mkdir()
    file.write_text("all of it")
    said = {"work": "no cache: give an empty", "work/thesis.tex": "^cannot open .*: make room.*$"}
    for name, message in said.items():
        with pytest.raises(CacheError, match=message):
            opened(name=name)
    assert [path.read_text() for path in file.parent.iterdir()] == ["all of it"]
