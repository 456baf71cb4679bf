"""The two-level cache of the example: what each level holds, and where a sample comes from."""

import io
import pickle
import threading

import numpy as np
import pytest
from PIL import Image

from data_cache import (
    CacheError,
    Counts,
    DataCache,
    Decode,
    Digits,
    Disk,
    ImageFolder,
    Memory,
    Throttled,
    stamp,
)
from data_cache._sources import make_record


class Numbers:
    """Records that begin with their index, and a count of how often each was read."""

    def __init__(self, count=12, identity="numbers", size=8):
        self.reads, self.identity, self.size = [0] * count, identity, size
        self._lock = threading.Lock()

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, index):
        with self._lock:
            self.reads[index] += 1
        return index.to_bytes(self.size, "little")

    def where(self, index):
        return f"number {index}"


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
    """Makes disk levels in one folder, and closes them."""
    opened = []

    def make(source, *, holds="records", prepare=None, name="cache", **options):
        disk = Disk(tmp_path / name, stamp(source, holds, prepare or Prepare()), **options)
        opened.append(disk)
        return disk

    yield make
    for disk in opened:
        disk.close()


def read_all(cache):
    for index in range(len(cache)):
        np.testing.assert_array_equal(cache[index]["x"], 10 * index, strict=False)


def test_the_second_epoch_is_all_from_memory(open_disk):
    source, prepare = Numbers(), Prepare()
    cache = DataCache(source, prepare, disk=open_disk(source))
    read_all(cache)
    first = cache.counts
    assert first == Counts(source_reads=12, source_bytes=12 * 8)
    read_all(cache)
    assert cache.counts - first == Counts(memory_hits=12)
    assert source.reads == [1] * 12
    assert prepare.calls == 12
    assert cache.memory_bytes == 12 * SAMPLE_BYTES


@pytest.mark.parametrize(("holds", "prepared"), [("records", 12), ("samples", 0)])
def test_another_run_reads_from_disk_and_not_from_the_source(open_disk, holds, prepared):
    source = Numbers()
    read_all(DataCache(source, Prepare(), disk=open_disk(source, holds=holds)))
    prepare = Prepare()
    cache = DataCache(source, prepare, disk=open_disk(source, holds=holds))
    read_all(cache)
    assert cache.counts == Counts(disk_hits=12)
    assert source.reads == [1] * 12
    assert prepare.calls == prepared
    read_all(cache)
    assert cache.counts == Counts(disk_hits=12, memory_hits=12)


def test_records_on_disk_fit_another_preparation(open_disk):
    source = Numbers()
    disk = open_disk(source)
    read_all(DataCache(source, Prepare(10), disk=disk))
    other = DataCache(source, Prepare(3), disk=open_disk(source, prepare=Prepare(3)))
    assert other[5]["x"][0] == 15
    assert source.reads[5] == 1


def test_without_levels_everything_comes_from_the_source():
    source = Numbers()
    cache = DataCache(source, Prepare(), memory=Memory(0))
    read_all(cache)
    read_all(cache)
    assert cache.counts == Counts(source_reads=24, source_bytes=24 * 8)
    assert cache.memory_bytes == 0


def test_a_full_memory_level_keeps_what_it_has(open_disk):
    source = Numbers()
    memory = Memory(5 * SAMPLE_BYTES + 1)
    cache = DataCache(source, Prepare(), memory=memory, disk=open_disk(source))
    read_all(cache)
    assert len(memory) == 5
    assert cache.memory_bytes == 5 * SAMPLE_BYTES
    for _ in range(2):
        before = cache.counts
        read_all(cache)
        assert cache.counts - before == Counts(memory_hits=5, disk_hits=7)
    assert source.reads == [1] * 12


def test_a_cached_sample_cannot_be_changed(open_disk):
    source = Numbers()
    disk = open_disk(source, holds="samples")
    cache = DataCache(source, Prepare(), disk=disk)
    for sample in (cache[3], cache[3], DataCache(source, Prepare(), disk=disk)[3]):
        with pytest.raises(ValueError, match="read-only"):
            sample["x"] += 1


def test_indices_are_those_of_a_sequence():
    cache = DataCache(Numbers(), Prepare())
    assert cache[-1]["x"][0] == 110
    assert cache[np.int64(2)]["x"][0] == 20
    with pytest.raises(IndexError):
        cache[12]


def test_many_threads_count_each_sample(open_disk):
    source = Numbers(60)
    cache = DataCache(source, Prepare(), disk=open_disk(source))

    def read(worker):
        share = range(worker, 60, 4)
        for index, sample in zip(share, cache.__getitems__(share), strict=True):
            assert sample["x"][0] == 10 * index

    for _ in range(2):
        threads = [threading.Thread(target=read, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert cache.counts == Counts(memory_hits=60, source_reads=60, source_bytes=60 * 8)
    assert source.reads == [1] * 60
    assert cache.memory_bytes == 60 * SAMPLE_BYTES


def test_a_record_that_cannot_be_prepared_is_named_and_not_kept(tmp_path, open_disk):
    folder = tmp_path / "images" / "cats"
    folder.mkdir(parents=True)
    (folder / "bad.jpg").write_bytes(b"no image")
    source = ImageFolder(folder.parent)
    disk = open_disk(source)
    cache = DataCache(source, Decode(8), disk=disk)
    with pytest.raises(CacheError, match=r"cannot prepare .*bad\.jpg: ") as caught:
        cache[0]
    assert "\n" not in str(caught.value)
    assert len(disk) == 0
    assert cache.memory_bytes == 0


def test_it_stays_in_its_process():
    with pytest.raises(TypeError, match="read it by threads"):
        pickle.dumps(DataCache(Numbers(), Prepare()))


def test_holds_is_checked():
    with pytest.raises(CacheError, match="holds is 'images'; expected 'records' or 'samples'"):
        stamp(Numbers(), "images", Prepare())


def test_a_disk_level_of_something_else_is_refused(open_disk):
    records, samples = open_disk(Numbers()), open_disk(Numbers(), holds="samples", name="samples")
    for disk, source, prepare in (
        (records, Numbers(identity="other"), Prepare()),
        (records, Numbers(13), Prepare()),
        (samples, Numbers(), Prepare(3)),
    ):
        with pytest.raises(CacheError, match="is of another source or preparation"):
            DataCache(source, prepare, disk=disk)
    DataCache(Numbers(), Prepare(3), disk=records)


def test_a_damaged_entry_is_fetched_again_and_counted(open_disk):
    source = Numbers()
    disk = open_disk(source)
    read_all(DataCache(source, Prepare(), disk=disk))
    disk._entries.set(3, b"something else")
    cache = DataCache(source, Prepare(), disk=disk)
    read_all(cache)
    assert cache.counts == Counts(disk_hits=11, source_reads=1, source_bytes=8, damaged=1)
    assert DataCache(source, Prepare(), disk=disk)[3]["x"][0] == 30
    assert source.reads[3] == 2


def test_a_training_goes_on_when_the_disk_level_is_full(open_disk):
    source, said = Numbers(size=3000), []
    empty = open_disk(source)
    room = empty._entries.volume() + 20_000
    cache = DataCache(source, Prepare(), disk=open_disk(source, limit=room, warn=said.append))
    read_all(cache)
    read_all(cache)
    assert cache.counts == Counts(memory_hits=12, source_reads=12, source_bytes=12 * 3000)
    assert 0 < len(empty) < 12
    assert len(said) == 1
    again = DataCache(source, Prepare(), disk=empty)
    read_all(again)
    assert again.counts.disk_hits + again.counts.source_reads == 12
    assert again.counts.disk_hits > 0


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


def test_a_throttled_source_takes_latency_and_bytes():
    clock = Clock()
    source = Throttled(
        Numbers(), bytes_per_second=16, latency=0.25, now=clock.now, sleep=clock.sleep
    )
    for index in range(4):
        assert source[index] == Numbers()[index]
    assert clock.time == 4 * (0.25 + 8 / 16)
    assert (len(source), source.identity, source.where(2)) == (12, "numbers", "number 2")


def test_reads_at_once_share_the_bytes_and_wait_together():
    """Three reads begin at time 0: the clock stands still while they wait."""
    waits = []
    source = Throttled(
        Numbers(), bytes_per_second=16, latency=0.25, now=lambda: 0.0, sleep=waits.append
    )
    for index in range(3):
        source[index]
    assert waits == [0.75, 1.25, 1.75]


@pytest.mark.parametrize("wrong", [{"bytes_per_second": 0}, {"bytes_per_second": -1.0}])
def test_a_rate_must_be_positive(wrong):
    with pytest.raises(CacheError, match=f"bytes_per_second is {wrong['bytes_per_second']}"):
        Throttled(Numbers(), **wrong)


def test_a_latency_must_be_finite():
    with pytest.raises(CacheError, match="latency is inf; it must be 0 or more seconds"):
        Throttled(Numbers(), latency=float("inf"))


def test_a_folder_of_images_is_its_files_and_classes(tmp_path):
    for label, name in enumerate(("ants", "bees")):
        (tmp_path / name).mkdir()
        for number in range(2):
            image = Image.new("RGB", (12, 10), (200 * label, 0, 50 * number))
            image.save(tmp_path / name / f"{number}.png")
    (tmp_path / "ants" / "notes.txt").write_text("not an image")
    source = ImageFolder(tmp_path)
    assert (len(source), source.classes) == (4, ["ants", "bees"])
    decode = Decode(6)
    samples = [decode(source[index]) for index in range(4)]
    assert [int(x["label"]) for x in samples] == [0, 0, 1, 1]
    assert {x["image"].shape for x in samples} == {(6, 6, 3)}
    assert samples[0]["image"].dtype == np.float32
    # Red 200 of 255, about a mean of 0.5 in units of 0.25.
    np.testing.assert_allclose(samples[2]["image"][..., 0], (200 / 255 - 0.5) / 0.25, rtol=1e-6)

    before = source.identity
    assert ImageFolder(tmp_path).identity == before
    Image.new("RGB", (12, 10)).save(tmp_path / "bees" / "2.png")
    assert ImageFolder(tmp_path).identity != before
    (tmp_path / "ants" / "0.png").unlink()
    with pytest.raises(CacheError, match=r"cannot read .*0\.png: No such file"):
        source[0]


@pytest.mark.parametrize("content", [None, "empty"])
def test_a_folder_without_images_is_named(tmp_path, content):
    folder = tmp_path / "images"
    if content:
        folder.mkdir()
    with pytest.raises(CacheError, match="is not a folder|holds no images"):
        ImageFolder(folder)


def test_digits_come_back_as_they_are():
    source = Digits("test")
    assert len(source) == 450
    sample = Decode(8, 1)(source[0])
    levels = (sample["image"] * 0.25 + 0.5) * 255 / 15
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
    assert levels.min() >= -1e-4
    assert levels.max() <= 16
    with pytest.raises(CacheError, match="part is 'all'"):
        Digits("all")


@pytest.mark.parametrize("record", [b"", b"\0\0", make_record(1, b""), make_record(1, b"\x89PNG")])
def test_a_record_that_is_no_image_is_an_error_that_the_cache_catches(record):
    with pytest.raises((ValueError, OSError)):
        Decode(8)(record)


def test_a_jpeg_that_is_cut_off_is_an_error():
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (1, 2, 3)).save(file, "JPEG")
    with pytest.raises(OSError, match="truncated"):
        Decode(64)(make_record(0, file.getvalue()[:-40]))
