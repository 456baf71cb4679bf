"""The data cache's images, a worker's share of them, and the training program around both."""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import train_cached
from data_cache import images
from data_cache.cache import DataCache, Loader
from data_cache.disk import CacheError
from data_cache.images import Decode, Digits, ImageFolder, Throttled

pytestmark = pytest.mark.usefixtures("default_promotion")


def test_throttled_source_takes_latency_and_bytes(monkeypatch):
    """The clock advances for successive reads, and stands still for three reads at once."""
    records = [index.to_bytes(3000, "little") for index in range(12)]
    source = type("Records", (list,), {"identity": "records", "names": range(12)})(records)
    for goes_on, expected in ((True, [187.75] * 3), (False, [187.75, 375.25, 562.75])):
        waits = []
        now = lambda waits=waits, on=goes_on: sum(waits) if on else 0.0  # noqa: E731
        monkeypatch.setattr(images, "time", SimpleNamespace(monotonic=now, sleep=waits.append))
        slow = Throttled(source, bytes_per_second=16, latency=0.25)
        assert [slow[index] for index in range(3)] == records[:3]
        assert waits == expected


def folder_of_images(folder, count):
    for label, name in enumerate(("ants", "bees")):
        (folder / name).mkdir()
        for number in range(count):
            image = Image.new("RGB", (20, 16), (200 * label, 0, 50 * number))
            image.save(folder / name / f"{number}.png")


def test_folder_of_images_is_its_files_and_classes(tmp_path):
    folder_of_images(tmp_path, 2)
    with pytest.raises(CacheError, match="no-such-folder holds no images"):
        ImageFolder(tmp_path / "no-such-folder")
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

    # A missing file and a file that is no image are named, and nothing is kept.
    (tmp_path / "ants" / "0.png").unlink()
    cut_off = tmp_path / "ants" / "1.png"
    cache = DataCache(source, Decode(6))
    with pytest.raises(CacheError, match=r"^cannot prepare .*0\.png: .*$"):
        cache[0]
    for content in (b"no image", cut_off.read_bytes()[:-30], b""):
        cut_off.write_bytes(content)
        with pytest.raises(CacheError, match=r"^cannot prepare .*1\.png: .*$"):
            cache[1]
    assert cache.memory_bytes == 0


# Shares.


class Samples(list):
    """Samples that hold their index, and a list of the read ones."""

    def __init__(self, count):
        super().__init__({"index": np.full(2, index)} for index in range(count))
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def loader(samples, **options):
    usual = {"worker": 0, "workers": 3, "batch": 4, "seed": 5, "threads": 0}
    return Loader(samples, **usual | options)


def indices(batches):
    return [index for batch in batches for index, _ in batch["index"].tolist()]


@pytest.mark.parametrize(("threads", "count"), [(0, 24), (3, 24), (0, 26)])
def test_loader_reads_its_own_share_in_a_new_order_in_each_epoch(threads, count):
    """With 26 samples, two workers have 9, and all take the steps of the one with 8."""
    for worker in range(3):
        samples, share = Samples(count), set(range(worker, count, 3))
        mine = loader(samples, worker=worker, threads=threads)
        assert mine.steps == 2
        orders = [indices(mine.epoch(number)) for number in range(6)]
        assert all(len(set(order)) == 8 for order in orders)
        assert set(sum(orders, [])) == set(samples.read) == share
        assert len({tuple(order) for order in orders}) == 6
        assert indices(mine.epoch(1)) == orders[1]


def test_augmentation_is_behind_the_cache_and_other_in_each_epoch_and_worker():
    def augment(sample, random):
        return {"x": sample["x"] + random.random()}

    def draw(worker, epoch):
        mine = loader(cache, worker=worker, workers=2, batch=25, augment=augment)
        return np.concatenate([batch["x"] for batch in mine.epoch(epoch)])

    prepare = Mock(return_value={"x": np.zeros(1)})
    cache = DataCache(Digits(test=True), prepare)
    drawn = [draw(worker, epoch) for worker in range(2) for epoch in range(2)]
    np.testing.assert_array_equal(draw(0, 1), drawn[1])
    assert len(np.unique(drawn)) == 4 * 225
    assert (prepare.call_count, cache[7]["x"]) == (450, 0)


def test_loader_names_a_share_that_there_is_not_and_a_source_that_fails():
    for batch, worker in ((4, 3), (9, 0), (0, 0)):
        what = f"a batch of {batch} of 8 samples, worker {worker} of 3"
        with pytest.raises(CacheError, match=what):
            loader(Samples(24), batch=batch, worker=worker)
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
def test_training_from_the_cache_learns_and_says_where_samples_came_from(tmp_path, capsys, holds):
    """Each of 4 workers has 336 or 337 of the 1,347 digits, and takes 21 batches of 16."""
    argv = [*QUICK, "--epochs", "4", "--cache", str(tmp_path / "cache"), "--holds", holds]
    assert train_cached.main(argv) == 0
    out, err = capsys.readouterr()
    first, second, _, last = rows(out)
    assert not err
    assert float(last["loss"]) < float(first["loss"])
    assert float(re.search(r"test accuracy (\d+\.\d+)%", out).group(1)) > 80
    places = ("memory hits", "disk hits", "source reads")
    assert [first[place] for place in places] == ["0.0%", "0.0%", "100.0%"]
    # At most three samples are new, which the first epoch left out.
    assert float(second["memory hits"].rstrip("%")) >= 99.7
    # 8x8 float32 and a label.
    assert first["memory MB"] == f"{1344 * 260 / 1e6:.2f}"

    assert train_cached.main(argv) == 0
    again = rows(capsys.readouterr().out)[0]
    assert float(again["disk hits"].rstrip("%")) >= 99.7
    assert again["memory hits"] == "0.0%"


@pytest.mark.slow
def test_training_with_a_full_disk_level_says_one_line(tmp_path, capsys):
    folder_of_images(tmp_path, 8)
    argv = ["--data", str(tmp_path), "--size", "16", "--batch", "8", "--epochs", "2", *QUICK[:4]]
    argv += ["--cache", str(tmp_path / "cache"), "--disk-limit", "0.001"]
    assert train_cached.main(argv) == 0
    out, err = capsys.readouterr()
    found = [(row["memory hits"], row["source reads"]) for row in rows(out)]
    assert found == [("0.0%", "100.0%"), ("100.0%", "0.0%")]
    assert err.count("\n") == 1
    assert "its limit of 1,000 bytes is reached); keeping what it holds" in err
