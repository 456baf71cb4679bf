"""Images from a slow source, a worker's share of them, and the training program around both."""

import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import train_cached
from data_cache import images
from data_cache.cache import DataCache, Loader
from data_cache.disk import CacheError, Disk, stamp
from data_cache.images import Augment, Decode, Digits, ImageFolder, Throttled

pytestmark = pytest.mark.usefixtures("default_promotion")

# Sources.


class Records(list):
    identity, names = "records", range(12)


def test_a_throttled_source_takes_latency_and_bytes(monkeypatch):
    """One after another the clock goes on; of three reads at once it stands still."""
    records = Records(index.to_bytes(3000, "little") for index in range(12))
    for goes_on, expected in ((True, [187.75] * 3), (False, [187.75, 375.25, 562.75])):
        waits = []
        now = lambda waits=waits, on=goes_on: sum(waits) if on else 0.0  # noqa: E731
        monkeypatch.setattr(images, "time", SimpleNamespace(monotonic=now, sleep=waits.append))
        source = Throttled(records, bytes_per_second=16, latency=0.25)
        assert [source[index] for index in range(3)] == records[:3]
        assert waits == expected
        assert (len(source), source.identity, source.names[2]) == (12, "records", 2)


def test_a_folder_of_images_is_its_files_and_classes(tmp_path):
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
    disk = Disk(tmp_path / "cache", stamp(source, None))
    cache = DataCache(source, Decode(6), disk=disk)
    for index in range(2):
        with pytest.raises(CacheError, match=rf"cannot prepare .*{index}\.png: ") as caught:
            cache[index]
        assert "\n" not in str(caught.value)
        assert (disk.get(index), cache.memory_bytes) == (None, 0)
    disk.close()


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


# Shares.


class Samples:
    """Samples that are their index, and a list of those that were read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return {"index": np.full(2, index)}


def loader(samples, worker=0, workers=3, batch=4, **options):
    options = {"seed": 5, "threads": 0} | options
    return Loader(samples, worker=worker, workers=workers, batch=batch, **options)


def indices(batches):
    found = [index for batch in batches for index in batch["index"].tolist()]
    assert all(one == other for one, other in found)
    return [one for one, _ in found]


@pytest.mark.parametrize(("threads", "count"), [(0, 24), (3, 24), (0, 26)])
def test_a_worker_reads_its_own_share_in_a_new_order_in_each_epoch(threads, count):
    """Of 26 samples two workers have 9, and all take the steps of the one with 8."""
    for worker in range(3):
        samples, share = Samples(count), set(range(worker, count, 3))
        mine = loader(samples, worker, threads=threads)
        assert mine.steps == 2
        orders = [indices(mine.epoch(number)) for number in range(6)]
        assert all(len(set(order)) == 8 for order in orders)
        assert set(sum(orders, [])) == set(samples.read) == share
        assert len({tuple(order) for order in orders}) == 6
        assert indices(mine.epoch(1)) == orders[1]


def test_augmentation_is_behind_the_cache_and_other_in_each_epoch_and_worker():
    class Zeros:
        identity, calls = "zeros", 0

        def __call__(self, record):
            self.calls += 1
            return {"x": np.zeros(1)}

    def draw(worker, epoch):
        augment = lambda sample, random: {"x": sample["x"] + random.random()}  # noqa: E731
        batches = loader(cache, worker, 2, 25, augment=augment).epoch(epoch)
        return np.concatenate([batch["x"] for batch in batches])

    prepare = Zeros()
    cache = DataCache(Digits(test=True), prepare)
    drawn = [draw(worker, epoch) for worker in range(2) for epoch in range(2)]
    np.testing.assert_array_equal(draw(0, 1), drawn[1])
    assert len(np.unique(drawn)) == 4 * 225
    assert (prepare.calls, cache[7]["x"]) == (450, 0)


def test_images_are_shifted_and_mirrored():
    image = np.arange(2 * 5 * 4, dtype=np.float32).reshape(5, 4, 2)
    sample = {"image": image.copy(), "label": np.int32(3)}
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), mode="edge")
    views = [padded[i : i + 5, j : j + 4] for i in range(3) for j in range(3)]
    views += [view[:, ::-1] for view in views]
    seen = set()
    for seed in range(200):
        made = Augment(shift=1, mirror=True)(sample, np.random.default_rng(seed))
        assert made["label"] == 3
        (found,) = [i for i, view in enumerate(views) if np.array_equal(view, made["image"])]
        seen.add(found)
    assert len(seen) == 18
    np.testing.assert_array_equal(sample["image"], image)


def test_a_share_that_there_is_not_and_a_source_that_fails_are_one_line():
    for options, what in (
        ({"worker": 3}, "a batch of 4 of 8 samples, worker 3 of 3"),
        ({"batch": 9}, "a batch of 9 of 8 samples, worker 0 of 3"),
        ({"batch": 0}, "a batch of 0 of 8 samples, worker 0 of 3"),
    ):
        with pytest.raises(CacheError, match=what):
            loader(Samples(24), **options)
    digits = Digits(test=True)
    digits[7:] = [b"no image"] * 443
    with pytest.raises(CacheError, match="cannot prepare [0-9]+: cannot identify"):
        next(loader(DataCache(digits, Decode(8)), threads=3).epoch(0))


QUICK = ["--latency", "0", "--bandwidth", "inf", "--batch", "64", "--workers", "4"]


def rows(out):
    """The numbers of each epoch, by column."""
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines() if "  " in line]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("holds", ["records", "samples"])
def test_a_training_from_the_cache_learns_and_says_where_samples_came_from(tmp_path, capsys, holds):
    """Of 1347 digits each of 4 workers has 336 or 337, and takes 21 batches of 16."""
    argv = [*QUICK, "--epochs", "4", "--cache", str(tmp_path / "cache"), "--holds", holds]
    assert train_cached.main(argv) == 0
    out, err = capsys.readouterr()
    first, second, _, last = rows(out)
    assert not err
    assert float(last["loss"]) < float(first["loss"])
    assert float(re.search(r"test accuracy (\d+\.\d+)%", out).group(1)) > 80
    places = ("memory hits", "disk hits", "source reads")
    assert [first[place] for place in places] == ["0.0%", "0.0%", "100.0%"]
    # At most three of the samples are new: those that the first epoch left out.
    assert float(second["memory hits"].rstrip("%")) >= 99.7
    # 8x8 float32 and a label.
    assert first["memory MB"] == f"{1344 * 260 / 1e6:.2f}"

    assert train_cached.main(argv) == 0
    again = rows(capsys.readouterr().out)[0]
    assert float(again["disk hits"].rstrip("%")) >= 99.7
    assert again["memory hits"] == "0.0%"


def test_a_folder_of_images_and_a_full_disk_level_is_one_line(tmp_path, capsys):
    for name in ("ants", "bees"):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("RGB", (20, 20), (number, 0, 0)).save(tmp_path / name / f"{number}.jpg")
    argv = ["--data", str(tmp_path), "--size", "16", "--batch", "8", "--epochs", "2", *QUICK[:4]]
    argv += ["--cache", str(tmp_path / "cache"), "--disk-limit", "0.001"]
    assert train_cached.main(argv) == 0
    out, err = capsys.readouterr()
    found = [(row["memory hits"], row["source reads"]) for row in rows(out)]
    assert found == [("0.0%", "100.0%"), ("100.0%", "0.0%")]
    assert err.count("\n") == 1
    assert "its limit of 1,000 bytes is reached); keeping what it holds" in err
