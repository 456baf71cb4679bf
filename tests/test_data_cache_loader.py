"""A worker's share, its order, its augmentation, and the training program around them."""

import json
import re

import numpy as np
import pytest
from PIL import Image

import train_cached
from data_cache import Augment, CacheError, Counts, DataCache, Decode, Digits, Disk, Loader, stamp

pytestmark = pytest.mark.usefixtures("default_promotion")


class Samples:
    """Samples that are their index, and a list of those that were read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return {"index": np.asarray(index), "pair": np.full(2, index)}


def loader(samples, worker=0, workers=3, batch=4, **options):
    options = {"seed": 5, "threads": 0} | options
    return Loader(samples, worker=worker, workers=workers, batch=batch, **options)


def indices(batches):
    return [int(index) for batch in batches for index in batch["index"]]


@pytest.mark.parametrize("threads", [0, 3])
def test_a_worker_reads_its_own_share_in_a_new_order_in_each_epoch(threads):
    orders = []
    for worker in range(3):
        samples = Samples(24)
        mine = loader(samples, worker, threads=threads)
        assert mine.steps == 2
        orders = [indices(mine.epoch(number)) for number in range(3)]
        share = list(range(worker, 24, 3))
        assert all(sorted(order) == share for order in orders)
        assert len({tuple(order) for order in orders}) == 3
        assert sorted(samples.read) == sorted(3 * share)
        assert indices(mine.epoch(1)) == orders[1]


def test_batches_have_a_leading_dimension():
    batch = next(loader(Samples(24)).epoch(0))
    assert batch["index"].shape == (4,)
    assert batch["pair"].shape == (4, 2)
    np.testing.assert_array_equal(batch["pair"][:, 1], batch["index"])


def test_reshuffled_shares_are_disjoint_and_change():
    shares = [
        [set(indices(loader(Samples(24), w, reshuffle=True).epoch(e))) for w in range(3)]
        for e in range(2)
    ]
    for epoch in shares:
        assert set.union(*epoch) == set(range(24))
        assert sum(map(len, epoch)) == 24
    assert shares[0] != shares[1]


def test_workers_take_as_many_steps_as_the_smallest_share_allows():
    """Of 26 samples two workers have 9 and one has 8."""
    samples = [Samples(26) for _ in range(3)]
    loaders = [loader(samples[worker], worker) for worker in range(3)]
    assert [x.steps for x in loaders] == [2, 2, 2]
    for worker, mine in enumerate(loaders):
        seen = set()
        for number in range(6):
            batch = indices(mine.epoch(number))
            assert len(set(batch)) == 8
            seen |= set(batch)
        assert seen == set(range(worker, 26, 3))


def test_augmentation_is_behind_the_cache_and_other_in_each_epoch_and_worker():
    class Zeros:
        identity = "zeros"
        calls = 0

        def __call__(self, record):
            self.calls += 1
            return {"x": np.zeros(1)}

    prepare = Zeros()
    cache = DataCache(Digits("test"), prepare)

    def augment(sample, random):
        return {"x": sample["x"] + random.random()}

    drawn = [
        np.concatenate([b["x"] for b in loader(cache, w, 2, 25, augment=augment).epoch(e)])
        for w in range(2)
        for e in (0, 1)
    ]
    again = loader(cache, 0, 2, 25, augment=augment).epoch(1)
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in again]), drawn[1])
    assert len(np.unique(drawn)) == 4 * 225
    assert prepare.calls == 450
    assert cache[7]["x"] == 0


def test_images_are_shifted_and_mirrored():
    image = np.arange(2 * 5 * 4, dtype=np.float32).reshape(5, 4, 2)
    sample = {"image": image.copy(), "label": np.int32(3)}
    seen = set()
    for seed in range(200):
        made = Augment(shift=1, mirror=True)(sample, np.random.default_rng(seed))
        assert made["label"] == 3
        found = [
            (down, right, mirrored)
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
            for mirrored in (False, True)
            if np.array_equal(
                shifted(image, down, right)[:, :: -1 if mirrored else 1], made["image"]
            )
        ]
        assert len(found) == 1
        seen.update(found)
    assert len(seen) == 18
    np.testing.assert_array_equal(sample["image"], image)


def shifted(image, down, right):
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), mode="edge")
    return padded[1 + down : 6 + down, 1 + right : 5 + right]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": 3}, "worker is 3, of 3: give 0 to 2"),
        ({"batch": 9}, "a batch of 9 samples, where each of 3 has 8"),
        ({"batch": 0}, "a batch of 0 samples"),
    ],
)
def test_a_share_that_there_is_not_is_one_line(options, message):
    with pytest.raises(CacheError, match=message):
        loader(Samples(24), **options)


def test_an_error_of_the_source_reaches_the_loop():
    class Broken(Samples):
        def __getitem__(self, index):
            raise CacheError("cannot read number 7")

    with pytest.raises(CacheError, match="cannot read number 7"):
        next(loader(Broken(24)).epoch(0))


def test_images_come_back_from_samples_on_disk(tmp_path):
    source, decode = Digits("test"), Decode(8, 1)
    disk = Disk(tmp_path / "cache", stamp(source, "samples", decode))
    first = DataCache(source, decode, disk=disk)
    second = DataCache(source, decode, disk=disk)
    for index in range(5):
        written, read = first[index], second[index]
        assert written.keys() == read.keys()
        for name in written:
            np.testing.assert_array_equal(read[name], written[name], strict=True)
    assert second.counts == Counts(disk_hits=5)
    disk.close()


QUICK = ["--latency", "0", "--bandwidth", "inf", "--batch", "64", "--workers", "4"]


def rows(out):
    """The numbers of each epoch, by column."""
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines() if "  " in line]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


class NoModel:
    """Calls every image a zero."""

    def __init__(self, classes):
        self.classes = classes

    def init(self, key, images):
        return {"params": {}}

    def apply(self, variables, images):
        return np.eye(1, self.classes).repeat(len(images), 0)


@pytest.fixture
def without_training(monkeypatch):
    """A model and a step that learn nothing, and of which little is compiled."""

    def make_train_step(loss_fn, tx, mesh):
        del loss_fn, tx, mesh
        return lambda params, state, batch: (params, state, np.float32(batch["label"].mean()))

    monkeypatch.setattr(train_cached, "Classifier", NoModel)
    monkeypatch.setattr(train_cached.optax_ext, "make_train_step", make_train_step)
    monkeypatch.setattr(train_cached.optax_ext, "init_state", lambda tx, params, mesh: ())


@pytest.mark.slow
@pytest.mark.usefixtures("without_training")
def test_an_epoch_says_where_its_samples_came_from(tmp_path, capsys):
    """Of 1347 digits each of 4 workers has 336 or 337, and takes 21 batches of 16."""
    argv = [*QUICK, "--epochs", "2", "--cache", str(tmp_path / "cache")]
    assert train_cached.main(argv) == 0
    out, err = capsys.readouterr()
    first, second = rows(out)
    assert out.endswith("test accuracy 10.00%\n")  # zeros are 45 of 450
    assert not err
    assert [first[x] for x in ("memory hits", "disk hits", "source reads")] == [
        "0.0%",
        "0.0%",
        "100.0%",
    ]
    # At most three of the samples are new: those that the first epoch left out.
    assert float(second["memory hits"].rstrip("%")) >= 99.7
    # 8x8 float32 and a label.
    assert first["memory MB"] == f"{1344 * 260 / 1e6:.2f}"

    assert train_cached.main(argv) == 0
    (again, _) = rows(capsys.readouterr().out)
    assert float(again["disk hits"].rstrip("%")) >= 99.7
    assert again["memory hits"] == "0.0%"


@pytest.mark.usefixtures("without_training")
def test_a_cache_of_another_version_is_one_line_and_stays(tmp_path, capsys):
    folder = tmp_path / "cache"
    disk = Disk(folder, stamp(Digits(), "records"))
    disk.put(0, b"a record")
    disk.close()
    file = folder / "data_cache.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    entries = (folder / "entries" / "cache.db").read_bytes()
    assert train_cached.main([*QUICK, "--cache", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err == (
        f"train_cached.py: {folder} holds a cache of another format (99; this run has 1): delete "
        "it, or give another folder\n"
    )
    assert (folder / "entries" / "cache.db").read_bytes() == entries


@pytest.mark.usefixtures("without_training")
def test_a_folder_of_images_and_reshuffled_shares(tmp_path, capsys):
    for name in ("ants", "bees"):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("RGB", (20, 20), (number, 0, 0)).save(tmp_path / name / f"{number}.jpg")
    argv = ["--data", str(tmp_path), "--size", "16", "--batch", "8", "--epochs", "2"]
    assert train_cached.main([*argv, *QUICK[:4], "--reshuffle", "--seed", "3"]) == 0
    first, second = rows(capsys.readouterr().out)
    assert first["source reads"] == "100.0%"
    assert 0 < float(second["memory hits"].rstrip("%")) < 100


@pytest.mark.usefixtures("without_training")
def test_a_disk_level_that_is_full_is_one_line_and_the_training_goes_on(tmp_path, capsys):
    argv = [*QUICK, "--epochs", "2", "--cache", str(tmp_path / "cache"), "--disk-limit", "0.1"]
    assert train_cached.main(argv) == 0
    out, err = capsys.readouterr()
    assert len(rows(out)) == 2
    assert err.count("\n") == 1
    assert "has reached its limit of 100,000 bytes; keeping the entries that it holds" in err


@pytest.mark.slow
def test_a_training_from_the_cache_learns(tmp_path, capsys):
    for fixed_or_not in ([], ["--reshuffle"]):
        argv = ["--latency", "0", "--bandwidth", "inf", *fixed_or_not]
        assert train_cached.main([*argv, "--epochs", "4"]) == 0
        out = capsys.readouterr().out
        assert float(rows(out)[-1]["loss"]) < float(rows(out)[0]["loss"])
        assert float(re.search(r"test accuracy (\d+\.\d+)%", out).group(1)) > 80


@pytest.mark.parametrize(
    "argv",
    [
        ["--bandwidth", "0"],
        ["--latency", "-1"],
        ["--memory-limit", "nan"],
        ["--workers", "3"],
        ["--batch", "4096"],
        ["--data", "no-such-folder"],
        ["--holds", "images"],
        ["--cache", __file__],
    ],
)
def test_wrong_options_are_one_line(argv, capsys):
    try:
        status = train_cached.main(argv)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("train_cached.py: ") or "error" not in message
    assert message
    assert "\n" not in message
