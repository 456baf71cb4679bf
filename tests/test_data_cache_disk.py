"""The disk level: what is cut off, damaged or of something else is never read as an entry."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import diskcache
import pytest

from data_cache.disk import CacheError, Disk

STAMP = {"format": 2, "source": "s", "size": 100, "entries": "records"}
PACKAGE = Path(__file__).parents[1] / "examples" / "data_cache"


def payload(index, size=5000):
    return bytes([index % 251]) * size + index.to_bytes(4, "little")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def opened():
    """Opens levels, and closes them."""
    disks = []

    def make(folder, stamp=STAMP, **options):
        disks.append(Disk(folder, stamp, **options))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


def filled(folder, count=20):
    disk = Disk(folder, STAMP)
    for index in range(count):
        disk.put(index, payload(index))
    disk.close()


def sql(folder, statement, *arguments):
    connection = sqlite3.connect(folder / "cache.db")
    with connection:
        rows = connection.execute(statement, arguments).fetchall()
    connection.close()
    return rows


def count_of_first(disk, count, size=5000):
    """How many of the first entries there are, where those after them must be missing."""
    found = [disk.get(index) for index in range(count)]
    there = sum(entry is not None for entry in found)
    assert found == [payload(i, size) if i < there else None for i in range(count)]
    assert disk.damaged == 0
    return there


@pytest.mark.parametrize("size", [0, 1, 5000, 300_000])
def test_what_was_put_is_there_in_the_next_run(folder, opened, size, capsys):
    disk = Disk(folder, STAMP)
    for index in range(20):
        disk.put(index, payload(index, size))
    disk.close()
    again = opened(folder)
    assert count_of_first(again, 21, size) == 20
    assert again.bytes > 20 * size
    assert not capsys.readouterr().err


# Of an entry of 5,008 bytes: 4 of a checksum, and the payload.
@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry[:2500],
        lambda entry: entry[:4],
        lambda entry: b"",
        lambda entry: entry + b"\0",
        lambda entry: entry[:3000] + bytes([entry[3000] ^ 1]) + entry[3001:],
        lambda entry: bytes(len(entry)),
        lambda entry: bytes([entry[0] ^ 1]) + entry[1:],
    ],
)
def test_an_entry_that_is_not_as_written_is_not_read_and_is_written_anew(folder, opened, damage):
    filled(folder)
    ((entry,),) = sql(folder, "SELECT value FROM Cache WHERE key = 7")
    assert len(entry) == 5008
    sql(folder, "UPDATE Cache SET value = ? WHERE key = 7", damage(entry))
    disk = opened(folder)
    assert (disk.get(7), disk.damaged) == (None, 1)
    assert (disk.get(8), disk.damaged) == (payload(8), 1)
    disk.put(7, payload(7))
    assert (disk.get(7), disk.damaged) == (payload(7), 1)


def test_an_entry_of_another_index_or_cache_is_damaged(folder, opened):
    """Also where somebody has changed the stamp of the file."""
    filled(folder)
    sql(folder, "DELETE FROM Cache WHERE key = 3")
    sql(folder, "UPDATE Cache SET key = 3 WHERE key = 4")
    disk = opened(folder)
    assert [disk.get(3), disk.get(5), disk.damaged] == [None, payload(5), 1]
    stamp = STAMP | {"source": "t"}
    sql(folder, "UPDATE Cache SET value = ? WHERE key = 'stamp'", json.dumps(stamp).encode())
    disk = opened(folder, stamp)
    assert [disk.get(5), disk.damaged] == [None, 1]


def test_what_is_pickled_is_not_unpickled(folder, opened, tmp_path):
    filled(folder)
    victim = tmp_path / "victim"

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(victim),)

    update = "UPDATE Cache SET value = ?, mode = ? WHERE key = "
    pickled = pickle.dumps(Malicious()), diskcache.core.MODE_PICKLE
    sql(folder, update + "7", *pickled)
    disk = opened(folder)
    assert (disk.get(7), disk.damaged) == (None, 1)
    sql(folder, update + "'stamp'", *pickled)
    with pytest.raises(CacheError, match="another format"):
        Disk(folder, STAMP)
    assert not victim.exists()


# A process that writes entries and says so; `patch` may end it.
# It imports nothing but the disk level: the levels above it take seconds.
CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {package!r})
from disk import Disk
def payload(index, size=5000):
    return bytes([index % 251]) * size + index.to_bytes(4, "little")
disk = Disk(Path(sys.argv[1]), {stamp!r})
{patch}
for index in range(100):
    disk.put(index, payload(index))
    print(index, flush=True)
"""


def child(folder, patch=""):
    source = CHILD.format(stamp=STAMP, package=str(PACKAGE), patch=patch)
    command = [sys.executable, "-c", source, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_process_killed_in_the_middle_of_a_write_leaves_no_part_of_it(folder, opened):
    """It ends after the row is inserted, and before the transaction is committed."""
    patch = """
insert = disk._entries._row_insert
def killed(key, *rest):
    insert(key, *rest)
    if key == 5:
        os.kill(os.getpid(), signal.SIGKILL)
disk._entries._row_insert = killed
"""
    with child(folder, patch) as process:
        assert process.communicate(timeout=120)[0].split() == list("01234")
    assert process.returncode == -signal.SIGKILL
    disk = opened(folder)
    assert count_of_first(disk, 10) == 5
    disk.put(5, payload(5))
    assert count_of_first(disk, 10) == 6


def test_processes_write_at_once_and_one_that_is_killed_leaves_whole_entries(folder, opened):
    killed, *others = [child(folder) for _ in range(3)]
    with killed:
        for line in killed.stdout:
            if line.strip() == "9":
                killed.kill()
                break
    assert count_of_first(opened(folder), 100) >= 10
    for process in others:
        with process:
            assert process.communicate(timeout=120)[0].split()[-1] == "99"
    assert count_of_first(opened(folder), 101) == 100


@pytest.mark.parametrize("keep", [0, 1, 50, 4096, 9000, -1])
def test_a_file_that_is_cut_off_gives_no_wrong_entry(folder, opened, keep, capsys):
    filled(folder)
    file = folder / "cache.db"
    file.write_bytes(file.read_bytes()[:keep])
    with contextlib.suppress(CacheError):
        disk = opened(folder)
        for index in range(20):
            assert disk.get(index) in (None, payload(index))
            disk.put(index, payload(index))
    assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize("limit", [100_000, float("inf")])
def test_what_is_full_is_said_once_and_keeps_what_it_has(folder, opened, limit, capsys):
    """By its limit, and by SQLite's error of a full disk, from its own limit of pages."""
    disk = opened(folder, limit=limit)
    disk._entries._sql("PRAGMA max_page_count = 40")
    for index in range(40):
        disk.put(index, payload(index))
    assert 5 < count_of_first(disk, 40) < 40
    assert disk._entries.volume() <= limit
    why = {100_000: "its limit of 100,000 bytes is reached"}.get(limit, "database or disk is full")
    assert capsys.readouterr().err == (
        f"data_cache: cannot write to {folder} any more ({why}); keeping what it holds\n"
    )


def test_a_cache_on_a_full_file_system_is_one_line(tmp_path, capsys):
    """Skips where none can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("takes the right to mount")
    try:
        disk = Disk(tmp_path / "cache", STAMP)
        for index in range(60):
            disk.put(index, payload(index, 400_000))
        assert 5 < count_of_first(disk, 60, 400_000) < 60
        assert capsys.readouterr().err.count("\n") == 1
        disk.close()
        (tmp_path / "other").write_bytes(bytes(shutil.disk_usage(tmp_path).free))
        with pytest.raises(CacheError, match="cannot open the cache in .*: make room") as caught:
            Disk(tmp_path / "cache", STAMP)
        assert "\n" not in str(caught.value)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_disk_that_cannot_be_read_any_more_is_one_line(folder, opened, capsys):
    filled(folder)
    disk = opened(folder)

    def fail(*arguments):
        raise sqlite3.DatabaseError("database disk image is malformed")

    disk._entries.get = disk._entries.set = fail
    for index in range(3):
        assert disk.get(index) is None
        disk.put(index, payload(index))
    assert disk.damaged == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "malformed" in err


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("format", 3, "format (2; this run has 3)"),
        ("source", "t", "source ('s'; this run has 't')"),
        ("size", 99, "size (100; this run has 99)"),
        ("entries", "samples, p", "entries ('records'; this run has 'samples, p')"),
    ],
)
def test_a_cache_of_something_else_is_refused_and_left_alone(folder, opened, field, value, word):
    filled(folder)
    before = sql(folder, "SELECT key, value FROM Cache")
    with pytest.raises(CacheError) as caught:
        Disk(folder, STAMP | {field: value})
    assert str(caught.value) == f"{folder} holds a cache of another {word}: give another folder"
    assert sql(folder, "SELECT key, value FROM Cache") == before
    assert count_of_first(opened(folder), 21) == 20


@pytest.mark.parametrize("text", [None, b"", b'{"format": 2', b"[1]", b"\xff"])
def test_entries_without_their_stamp_are_refused(folder, text):
    filled(folder)
    sql(folder, "DELETE FROM Cache WHERE key = 'stamp' AND ? IS NULL", text)
    sql(folder, "UPDATE Cache SET value = ? WHERE key = 'stamp'", text)
    with pytest.raises(CacheError, match=r"a cache of another format \(None; this run has 2\)"):
        Disk(folder, STAMP)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CacheError, match="is not empty, and no cache: give an empty folder"):
        Disk(tmp_path, STAMP)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(CacheError, match="cannot open the cache in .*thesis.tex"):
        Disk(tmp_path / "thesis.tex", STAMP)
    assert (tmp_path / "thesis.tex").read_text() == "all of it"
