"""The disk level: what is cut off, damaged or of something else is never read as an entry."""

import json
import os
import pickle
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import diskcache
import pytest

from data_cache import CacheError, Disk

STAMP = {"format": 1, "holds": "records", "source": "s", "samples": 100, "prepare": None}
PACKAGE = Path(__file__).parents[1] / "examples" / "data_cache"


def payload(index, size=5000):
    return bytes([index % 251]) * size + index.to_bytes(4, "little")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def opened():
    """Opens levels, with a list of their warnings, and closes them."""
    disks = []

    def make(folder, stamp=STAMP, **options):
        said = []
        disk = Disk(folder, stamp, warn=said.append, **options)
        disks.append(disk)
        return disk, said

    yield make
    for disk in disks:
        disk.close()


def filled(folder, count=20, stamp=STAMP):
    disk = Disk(folder, stamp)
    for index in range(count):
        assert disk.put(index, payload(index))
    disk.close()


def sql(folder, statement, *arguments):
    connection = sqlite3.connect(folder / "entries" / "cache.db")
    with connection:
        rows = connection.execute(statement, arguments).fetchall()
    connection.close()
    return rows


def test_what_was_put_is_there_in_the_next_run(folder, opened):
    filled(folder)
    disk, said = opened(folder)
    assert len(disk) == 20
    for index in range(20):
        assert disk.get(index) == (payload(index), False)
    assert disk.get(20) == (None, False)
    assert disk.bytes > 20 * 5000
    assert not said


def test_two_may_share_a_folder(folder, opened):
    (one, _), (two, _) = opened(folder), opened(folder)
    assert one.put(1, b"one")
    assert two.put(2, b"two")
    assert two.put(1, b"one")
    assert (one.get(2).payload, two.get(1).payload, len(one)) == (b"two", b"one", 2)


@pytest.mark.parametrize("size", [0, 1, 100, 300_000])
def test_entries_of_any_size(folder, opened, size):
    disk, _ = opened(folder)
    assert disk.put(0, payload(0, size))
    assert disk.get(0).payload == payload(0, size)


# Of an entry of 5,016 bytes: 12 of header, and the payload.
@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry[:-1],
        lambda entry: entry[:2500],
        lambda entry: entry[:12],
        lambda entry: entry[:5],
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
    sql(folder, "UPDATE Cache SET value = ? WHERE key = 7", damage(entry))
    disk, said = opened(folder)
    assert disk.get(7) == (None, True)
    assert disk.get(8) == (payload(8), False)
    assert disk.put(7, payload(7))
    assert disk.get(7) == (payload(7), False)
    assert len(disk) == 20
    assert not said


def test_an_entry_in_the_place_of_another_is_damaged(folder, opened):
    filled(folder)
    sql(folder, "DELETE FROM Cache WHERE key = 3")
    sql(folder, "UPDATE Cache SET key = 3 WHERE key = 4")
    disk, _ = opened(folder)
    assert disk.get(3) == (None, True)


def test_entries_of_another_cache_are_damaged(folder, tmp_path, opened):
    """Also where somebody has copied the file under another stamp."""
    filled(folder)
    other = tmp_path / "other"
    filled(other, 0, STAMP | {"source": "t"})
    shutil.copy(folder / "entries" / "cache.db", other / "entries" / "cache.db")
    disk, _ = opened(other, STAMP | {"source": "t"})
    assert len(disk) == 20
    assert disk.get(3) == (None, True)


def test_what_is_pickled_is_not_unpickled(folder, opened, tmp_path):
    filled(folder)
    victim = tmp_path / "victim"

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(victim),)

    sql(
        folder,
        "UPDATE Cache SET value = ?, mode = ? WHERE key = 7",
        pickle.dumps(Malicious()),
        diskcache.core.MODE_PICKLE,
    )
    disk, said = opened(folder)
    assert disk.get(7).payload is None
    assert not victim.exists()
    assert len(said) == 1


# A process that writes entries and says so; `patch` may end it.
# It imports nothing but the disk level: the package as a whole takes seconds.
CHILD = """
import os, signal, sys, types
from pathlib import Path
sys.modules["data_cache"] = types.ModuleType("data_cache")
sys.modules["data_cache"].__path__ = [{package!r}]
from data_cache._disk import Disk
stamp = {stamp!r}
def payload(index, size=5000):
    return bytes([index % 251]) * size + index.to_bytes(4, "little")
disk = Disk(Path(sys.argv[1]), stamp)
{patch}
for index in range(100):
    disk.put(index, payload(index))
    print(index, flush=True)
"""
END = "os.kill(os.getpid(), signal.SIGKILL)"


def run_child(folder, patch):
    source = CHILD.format(stamp=STAMP, package=str(PACKAGE), patch=patch)
    return subprocess.run(
        [sys.executable, "-c", source, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_process_killed_in_the_middle_of_a_write_leaves_no_part_of_it(folder, opened):
    """It ends after the row is inserted, and before the transaction is committed."""
    patch = f"""
insert = disk._entries._row_insert
def killed(key, *rest):
    insert(key, *rest)
    if key == 5:
        {END}
disk._entries._row_insert = killed
"""
    child = run_child(folder, patch)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout.split() == list("01234")
    disk, said = opened(folder)
    assert len(disk) == 5
    assert [disk.get(index).payload for index in range(5)] == [payload(i) for i in range(5)]
    assert disk.get(5) == (None, False)
    assert disk.put(5, payload(5))
    assert disk.get(5).payload == payload(5)
    assert not said


def test_a_process_killed_at_any_time_leaves_whole_entries(folder, opened):
    source = CHILD.format(stamp=STAMP, package=str(PACKAGE), patch="")
    child = subprocess.Popen(
        [sys.executable, "-c", source, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        for line in child.stdout:
            if line.strip() == "9":
                child.kill()
                break
    disk, _ = opened(folder)
    assert len(disk) >= 10
    for index in range(100):
        entry = disk.get(index)
        assert not entry.damaged
        assert entry.payload == (payload(index) if index < len(disk) else None)


@pytest.mark.parametrize("keep", [0, 1, 50, 4096, 9000, -1])
def test_a_file_that_is_cut_off_gives_no_wrong_entry(folder, opened, keep):
    filled(folder)
    file = folder / "entries" / "cache.db"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    message = ""
    try:
        disk, said = opened(folder)
    except CacheError as error:
        message = str(error)
    if message:
        assert re.fullmatch(r"cannot open the cache in .*, or delete the folder", message)
        return
    found = [disk.get(index).payload for index in range(20)]
    assert all(x in (None, payload(index)) for index, x in enumerate(found))
    assert len(said) <= 1


def test_a_limit_is_kept_and_said_once(folder, opened):
    disk, said = opened(folder, limit=100_000)
    written = [disk.put(index, payload(index)) for index in range(30)]
    count = sum(written)
    assert 5 < count < 20
    assert written == [True] * count + [False] * (30 - count)
    assert disk._entries.volume() <= 100_000
    assert said == [
        f"data_cache: the cache in {folder} has reached its limit of 100,000 bytes; keeping the "
        "entries that it holds, and reading the rest from the source in each run"
    ]
    assert disk.get(0).payload == payload(0)
    assert disk.get(29) == (None, False)


def test_a_full_disk_is_said_once_and_what_is_there_stays(folder, opened):
    """SQLite's own error of a full disk, from its limit of pages."""
    disk, said = opened(folder)
    disk._entries._sql("PRAGMA max_page_count = 40")
    written = [disk.put(index, payload(index)) for index in range(40)]
    count = sum(written)
    assert 5 < count < 40
    assert written == [True] * count + [False] * (40 - count)
    assert len(said) == 1
    assert "database or disk is full" in said[0]
    assert "\n" not in said[0]
    for index in range(40):
        assert disk.get(index).payload == (payload(index) if index < count else None)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MB; skips where none can be mounted."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("takes the right to mount")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_file_system_that_is_full(small_disk, opened):
    disk, said = opened(small_disk / "cache", keep_free=-(10**9))  # it does not look before
    written = [disk.put(index, payload(index, 400_000)) for index in range(60)]
    count = sum(written)
    assert 5 < count < 60
    assert len(said) == 1
    assert "database or disk is full" in said[0]
    for index in range(60):
        expected = payload(index, 400_000) if index < count else None
        assert disk.get(index) == (expected, False)


def test_some_of_a_file_system_is_kept_free_and_the_next_run_goes_on(small_disk, opened):
    disk, said = opened(small_disk / "cache", keep_free=6_000_000)
    written = [disk.put(index, payload(index, 400_000)) for index in range(60)]
    count = sum(written)
    assert 5 < count < 60
    assert written == [True] * count + [False] * (60 - count)
    assert said == [
        f"data_cache: the disk of {small_disk / 'cache'} has less than 6,000,000 bytes free; "
        "keeping the entries that it holds, and reading the rest from the source in each run"
    ]
    again, said = opened(small_disk / "cache", keep_free=6_000_000)
    assert len(again) == count
    for index in range(count):
        assert again.get(index).payload == payload(index, 400_000)
    assert not said


def test_a_cache_that_cannot_be_opened_on_a_full_disk_is_one_line(small_disk):
    disk = Disk(small_disk / "cache", STAMP, keep_free=0)
    assert disk.put(0, payload(0))
    disk.close()
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(CacheError, match="cannot open the cache in .*: make room") as caught:
        Disk(small_disk / "cache", STAMP)
    assert "\n" not in str(caught.value)
    (small_disk / "other").unlink()
    disk = Disk(small_disk / "cache", STAMP)
    assert disk.get(0).payload == payload(0)
    disk.close()


def test_a_disk_that_cannot_be_read_any_more_is_said_once(folder, opened):
    filled(folder)
    disk, said = opened(folder)

    def fail(index):
        raise sqlite3.DatabaseError("database disk image is malformed")

    disk._entries.get = fail
    assert disk.get(1) == (None, True)
    assert disk.get(2) == (None, False)
    assert not disk.put(3, b"x")
    assert len(said) == 1
    assert "going on from the source" in said[0]
    assert "malformed" in said[0]


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("format", 2, "format (1; this run has 2)"),
        ("holds", "samples", "kind of entries ('records'; this run has 'samples')"),
        ("source", "t", "source ('s'; this run has 't')"),
        ("samples", 99, "number of samples (100; this run has 99)"),
        ("prepare", "p", "preparation (None; this run has 'p')"),
    ],
)
def test_a_cache_of_something_else_is_refused_and_left_alone(folder, field, value, word):
    filled(folder)
    before = contents(folder)
    with pytest.raises(CacheError) as caught:
        Disk(folder, STAMP | {field: value})
    assert str(caught.value) == (
        f"{folder} holds a cache of another {word}: delete it, or give another folder"
    )
    assert contents(folder) == before


@pytest.mark.parametrize("text", ["", '{"format": 1', "[]", "\0"])
def test_a_damaged_stamp_is_refused(folder, text):
    filled(folder)
    (folder / "data_cache.json").write_text(text)
    before = contents(folder)
    with pytest.raises(CacheError, match="data_cache.json is damaged: delete"):
        Disk(folder, STAMP)
    assert contents(folder) == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CacheError, match="is not empty, and no cache: give an empty folder"):
        Disk(tmp_path, STAMP)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_stamp_that_was_cut_off_is_written_anew(folder, opened):
    folder.mkdir()
    (folder / "data_cache.json.123.part").write_text('{"form')
    opened(folder)
    assert json.loads((folder / "data_cache.json").read_text()) == STAMP


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot use .*file for a cache"):
        Disk(tmp_path / "file", STAMP)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
