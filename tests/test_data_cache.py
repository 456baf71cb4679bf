"""The two-level cache of the example: where a sample comes from, and what each level holds.

What is cut off, damaged or of something else is never read as an entry.
"""

import contextlib
import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import diskcache
import numpy as np
import pytest

from data_cache.cache import DataCache
from data_cache.disk import CacheError, Disk, stamp

# Both levels.


class Numbers:
    """Records that begin with their index, and a count of how often each was read."""

    def __init__(self, count=12, identity="numbers"):
        self.reads, self.identity, self.names = [0] * count, identity, range(count)

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, index):
        self.reads[index] += 1
        return index.to_bytes(3000, "little")


class Prepare:
    """Makes ten times the number of it, and counts."""

    def __init__(self, factor=10):
        self.identity, self.factor, self.calls = f"times {factor}", factor, 0

    def __call__(self, record):
        self.calls += 1
        return {"x": np.full(4, self.factor * int.from_bytes(record[:8], "little"), np.int32)}


SAMPLE_BYTES = 16


@pytest.fixture
def open_disk(tmp_path):
    """Makes disk levels in folders by name, and closes them."""
    opened = []

    def make(source, samples_of=None, name="cache", **options):
        opened.append(Disk(tmp_path / name, stamp(source, samples_of), **options))
        return opened[-1]

    yield make
    for disk in opened:
        disk.close()


def read_all(cache):
    """What the cache did for all samples in turn."""
    before = Counter(cache.counts)
    for index in range(len(cache)):
        expected = np.full(4, 10 * index, np.int32)
        np.testing.assert_array_equal(cache[index]["x"], expected, strict=True)
    return cache.counts - before


def from_source(count):
    return Counter(source_reads=count, source_bytes=count * 3000)


@pytest.mark.parametrize(("samples_of", "prepared"), [(None, 12), (Prepare(), 0)])
def test_an_epoch_is_from_memory_and_another_run_from_disk(open_disk, samples_of, prepared):
    source, prepare = Numbers(), Prepare()
    cache = DataCache(source, prepare, disk=open_disk(source, samples_of))
    assert read_all(cache) == from_source(12)
    assert read_all(cache) == Counter(memory_hits=12)
    assert (prepare.calls, cache.memory_bytes) == (12, 12 * SAMPLE_BYTES)
    prepare = Prepare()
    cache = DataCache(source, prepare, disk=open_disk(source, samples_of))
    assert read_all(cache) == Counter(disk_hits=12)
    assert read_all(cache) == Counter(memory_hits=12)
    assert (prepare.calls, source.reads) == (prepared, [1] * 12)


def test_a_full_memory_level_keeps_what_it_has(open_disk):
    source = Numbers()
    nothing = DataCache(source, Prepare(), memory_limit=0)
    assert read_all(nothing) == read_all(nothing) == from_source(12)
    limit = 5 * SAMPLE_BYTES + 1
    cache = DataCache(source, Prepare(), memory_limit=limit, disk=open_disk(source))
    assert read_all(cache) == from_source(12)
    assert read_all(cache) == read_all(cache) == Counter(memory_hits=5, disk_hits=7)
    assert (nothing.memory_bytes, cache.memory_bytes) == (0, 5 * SAMPLE_BYTES)


def test_it_is_a_sequence_of_read_only_samples_that_stays_in_its_process(open_disk):
    source, disk = Numbers(), open_disk(Numbers(), Prepare())
    cache, other = (DataCache(source, Prepare(), disk=disk) for _ in range(2))
    assert [x["x"][0] for x in (cache[-1], cache[np.int64(2)], other[-1])] == [110, 20, 110]
    for sample in (cache[-1], cache[2], other[-1]):  # of the source, memory and disk
        with pytest.raises(ValueError, match="read-only"):
            sample["x"] += 1
    with pytest.raises(IndexError):
        cache[12]
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(cache)


def test_many_threads_count_each_sample(open_disk):
    source = Numbers(60)
    cache = DataCache(source, Prepare(), disk=open_disk(source))
    shares = [range(worker, 60, 4) for worker in range(4)]
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(cache.__getitems__, shares))
        assert [[int(x["x"][0]) // 10 for x in part] for part in found] == list(map(list, shares))
    assert cache.counts == from_source(60) + Counter(memory_hits=60)
    assert (source.reads, cache.memory_bytes) == ([1] * 60, 60 * SAMPLE_BYTES)


def test_a_disk_level_of_something_else_is_refused(open_disk):
    records, samples = open_disk(Numbers()), open_disk(Numbers(), Prepare(), name="samples")
    for disk, source, prepare in (
        (records, Numbers(identity="other"), Prepare()),
        (records, Numbers(13), Prepare()),
        (samples, Numbers(), Prepare(3)),
    ):
        with pytest.raises(CacheError, match="is of another source or preparation"):
            DataCache(source, prepare, disk=disk)
    read_all(DataCache(Numbers(), Prepare(), disk=records))
    other = DataCache(Numbers(), Prepare(3), disk=records)  # records fit any preparation
    assert (other[5]["x"][0], other.counts) == (15, Counter(disk_hits=1))


def test_a_damaged_entry_is_fetched_again_and_counted(open_disk):
    source = Numbers()
    disk = open_disk(source)
    read_all(DataCache(source, Prepare(), disk=disk))
    disk._entries.set(3, b"something else")
    again = DataCache(source, Prepare(), disk=disk)
    assert read_all(again) == Counter(disk_hits=11) + from_source(1)
    assert (disk.damaged, source.reads[3]) == (1, 2)
    assert read_all(DataCache(source, Prepare(), disk=disk)) == Counter(disk_hits=12)


# The disk level.

STAMP = {"format": 2, "source": "s", "size": 100, "entries": "records"}

PACKAGE = Path(__file__).parents[1] / "examples" / "data_cache"

# Of 20 entries of 5,008 bytes, 4 of a checksum and the payload; -1: of another entry.
DAMAGES = (
    lambda entry: entry[:2500],
    lambda entry: entry[:4],
    lambda entry: b"",
    lambda entry: entry + b"\0",
    lambda entry: entry[:3000] + bytes([entry[3000] ^ 1]) + entry[3001:],
    lambda entry: bytes(len(entry)),
    lambda entry: bytes([entry[0] ^ 1]) + entry[1:],
)

SET = "UPDATE Cache SET value = ? WHERE key = ?"

PICKLED = "UPDATE Cache SET value = ?, mode = ? WHERE key = ?"


def payload(index, size=5000):
    return bytes([index % 251]) * size + index.to_bytes(4, "little")


@pytest.fixture
def opened(tmp_path):
    """Opens a level, with some entries, and closes it."""
    disks = []

    def make(stamp=STAMP, fill=0, size=5000, **options):
        disks.append(Disk(tmp_path / "cache", stamp, **options))
        for index in range(fill):
            disks[-1].put(index, payload(index, size))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


def sql(disk, statement, *arguments):
    with contextlib.closing(sqlite3.connect(disk.folder / "cache.db")) as connection, connection:
        return connection.execute(statement, arguments).fetchall()


def count_of_first(disk, count, size=5000):
    """How many of the first entries there are, where those after them must be missing."""
    found = [disk.get(index) for index in range(count)]
    there = sum(entry is not None for entry in found)
    assert found == [payload(i, size) if i < there else None for i in range(count)]
    assert disk.damaged == 0
    return there


@pytest.mark.parametrize("size", [0, 1, 5000, 300_000])
def test_what_was_put_is_there_in_the_next_run(opened, size, capsys):
    opened(fill=20, size=size).close()
    again = opened()
    assert count_of_first(again, 21, size) == 20
    assert again.bytes > 20 * size
    assert not capsys.readouterr().err


def test_an_entry_that_is_not_as_written_is_not_read_and_is_written_anew(opened):
    disk = opened(fill=20)
    for index, damage in enumerate(DAMAGES):
        ((entry,),) = sql(disk, "SELECT value FROM Cache WHERE key = ?", index)
        sql(disk, SET, damage(entry), index)
    ((entry,),) = sql(disk, "SELECT value FROM Cache WHERE key = 8")
    sql(disk, SET, entry, 7)
    found = [disk.get(index) for index in range(20)]
    assert found == [None] * 8 + [payload(index) for index in range(8, 20)]
    assert disk.damaged == 8
    for index in range(8):
        disk.put(index, payload(index))
    assert count_of_first(opened(), 20) == 20


def test_entries_of_another_cache_and_what_is_pickled_are_damaged(opened, tmp_path):
    """Also where somebody has changed the stamp of the file."""

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "victim"),)

    disk, stamp = opened(fill=2), STAMP | {"source": "t"}
    sql(disk, SET, json.dumps(stamp).encode(), "stamp")
    other = opened(stamp)
    assert [other.get(0), other.damaged] == [None, 1]
    for key in (0, "stamp"):
        sql(disk, PICKLED, pickle.dumps(Malicious()), diskcache.core.MODE_PICKLE, key)
    assert [disk.get(0), disk.get(1), disk.damaged] == [None, payload(1), 1]
    with pytest.raises(CacheError, match="another format"):
        opened()
    assert not (tmp_path / "victim").exists()


# It imports nothing but the disk level: the levels above it take seconds.
CHILD = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(PACKAGE)!r})
from disk import Disk
disk = Disk(Path(sys.argv[1]), {STAMP!r})
insert = disk._entries._row_insert
def killed(key, *rest):
    insert(key, *rest)
    if key == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
disk._entries._row_insert = killed
for index in range(100):
    disk.put(index, bytes([index % 251]) * 5000 + index.to_bytes(4, "little"))
"""


def test_processes_share_a_folder_and_one_that_is_killed_leaves_whole_entries(opened, tmp_path):
    """It ends after a row is inserted, and before the transaction is committed."""

    def start(end):
        return subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "cache"), str(end)])

    assert start(5).wait(120) == -signal.SIGKILL
    assert count_of_first(opened(), 10) == 5
    at_once = [start(end) for end in (1000, 1000, 60)]
    codes = [process.wait(120) for process in at_once]
    assert codes[:2] == [0, 0]
    assert count_of_first(opened(), 101) == 100


@pytest.mark.parametrize("keep", [0, 1, 50, 4096, 9000, -1])
def test_a_file_that_is_cut_off_gives_no_wrong_entry(opened, keep, capsys):
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


FULL = [(10**5, "its limit of 100,000 bytes is reached"), (10**9, "database or disk is full")]


@pytest.mark.parametrize(("limit", "why"), FULL)
def test_what_is_full_is_said_once_and_keeps_what_it_has(opened, limit, why, capsys):
    """By its limit, and by SQLite's error of a full disk, from its own limit of pages."""
    disk = opened(limit=limit)
    disk._entries._sql("PRAGMA max_page_count = 40")
    for index in range(40):
        disk.put(index, payload(index))
    assert 5 < count_of_first(disk, 40) < 40
    assert disk._entries.volume() <= limit
    said = f"data_cache: cannot write to {disk.folder} any more ({why}); keeping what it holds\n"
    assert capsys.readouterr().err == said


def test_a_disk_that_fails_is_one_line_and_one_that_fails_at_the_start_is_refused(
    opened, capsys, monkeypatch
):
    def fail(*arguments, **options):
        raise sqlite3.OperationalError("database or disk is full")

    disk = opened(fill=3)
    disk._entries.get = disk._entries.set = fail
    for index in range(3):
        assert disk.get(index) is None
        disk.put(index, payload(index))
    assert disk.damaged == 3
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(diskcache.Cache, "reset", fail)
    with pytest.raises(CacheError, match=r"cannot open .*disk is full\): make room") as caught:
        opened()
    assert "\n" not in str(caught.value)


def test_a_cache_of_something_else_is_refused_and_left_alone(opened):
    disk = opened(fill=20)
    before = sql(disk, "SELECT key, value FROM Cache")
    for field, value, word in (
        ("format", 3, "format (2; this run has 3)"),
        ("source", "t", "source ('s'; this run has 't')"),
        ("size", 99, "size (100; this run has 99)"),
        ("entries", "samples, p", "entries ('records'; this run has 'samples, p')"),
    ):
        with pytest.raises(CacheError) as caught:
            opened(STAMP | {field: value})
        message = f"{disk.folder} holds a cache of another {word}: give another folder"
        assert str(caught.value) == message
    assert sql(disk, "SELECT key, value FROM Cache") == before
    for text in (b"", b'{"format": 2', b"[1]", b"\xff", None):
        sql(disk, SET, text, "stamp")
        if text is None:
            sql(disk, "DELETE FROM Cache WHERE key = 'stamp'")
        with pytest.raises(CacheError, match=r"of another format \(None; this run has 2\)"):
            opened()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CacheError, match="is not empty, and no cache: give an empty folder"):
        Disk(tmp_path, STAMP)
    with pytest.raises(CacheError, match="cannot open the cache in .*thesis.tex"):
        Disk(tmp_path / "thesis.tex", STAMP)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["all of it"]
