"""The two-level cache of the example: what each level holds, and where a sample comes from."""

import io
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from data_cache import images
from data_cache.cache import DataCache
from data_cache.disk import CacheError, Disk, stamp
from data_cache.images import Decode, Digits, ImageFolder, Throttled


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


def test_a_throttled_source_takes_latency_and_bytes(monkeypatch):
    """One after another the clock goes on; of three reads at once it stands still."""
    for goes_on, expected in ((True, [187.75] * 3), (False, [187.75, 375.25, 562.75])):
        waits = []
        now = lambda waits=waits, on=goes_on: sum(waits) if on else 0.0  # noqa: E731
        monkeypatch.setattr(images, "time", SimpleNamespace(monotonic=now, sleep=waits.append))
        source = Throttled(Numbers(), bytes_per_second=16, latency=0.25)
        assert [source[index] for index in range(3)] == [Numbers()[index] for index in range(3)]
        assert waits == expected
        assert (len(source), source.identity, source.names[2]) == (12, "numbers", 2)


def test_a_folder_of_images_is_its_files_and_classes(tmp_path, open_disk):
    for label, name in enumerate(("ants", "bees")):
        (tmp_path / name).mkdir()
        for number in range(2):
            image = Image.new("RGB", (12, 10), (200 * label, 0, 50 * number))
            image.save(tmp_path / name / f"{number}.png")
    (tmp_path / "ants" / "notes.txt").write_text("not an image")
    for folder in (tmp_path / "ants", tmp_path / "no-such-folder"):
        with pytest.raises(CacheError, match=f"{folder} holds no images"):
            ImageFolder(folder)
    source = ImageFolder(tmp_path)
    assert (len(source), source.classes) == (4, ["ants", "bees"])
    samples = [Decode(6)(source[index]) for index in range(4)]
    assert [int(x["label"]) for x in samples] == [0, 0, 1, 1]
    assert {(x["image"].shape, x["image"].dtype.name) for x in samples} == {((6, 6, 3), "float32")}
    # Red 200 of 255, about a mean of 0.5 in units of 0.25.
    np.testing.assert_allclose(samples[2]["image"][..., 0], (200 / 255 - 0.5) / 0.25, rtol=1e-6)
    assert ImageFolder(tmp_path).identity == source.identity
    Image.new("RGB", (12, 10)).save(tmp_path / "bees" / "2.png")
    assert ImageFolder(tmp_path).identity != source.identity

    # One that is gone and one that is no image are named, and nothing is kept.
    (tmp_path / "ants" / "0.png").unlink()
    (tmp_path / "ants" / "1.png").write_bytes(b"no image")
    disk = open_disk(source)
    cache = DataCache(source, Decode(6), disk=disk)
    for index in range(2):
        with pytest.raises(CacheError, match=rf"cannot prepare .*{index}\.png: ") as caught:
            cache[index]
        assert "\n" not in str(caught.value)
        assert (disk.get(index), cache.memory_bytes) == (None, 0)


def test_digits_come_back_as_they_are():
    source = Digits(test=True)
    assert (len(source), len(Digits())) == (450, 1347)
    sample = Decode(8, 1)(source[0])
    levels = (sample["image"] * 0.25 + 0.5) * 255 / 15
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
    assert -1e-4 <= levels.min() < levels.max() <= 16 + 1e-4


def test_a_record_that_is_no_image_is_an_error_that_the_cache_catches():
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    for record in (b"", b"\0\0", bytes(4), bytes(4) + b"\x89PNG", bytes(4) + file.getvalue()[:-40]):
        with pytest.raises((ValueError, OSError)):
            Decode(64)(record)
