"""The demo, train_digits.py: what it reports of runs that are made up, and of real ones."""

import json

import numpy as np
import pytest
from PIL import Image

import _report
import train_digits
from _data import digits
from _report import HeldOut, Run

pytestmark = pytest.mark.usefixtures("default_promotion")

STEPS, WORKERS, SIZE, IMAGES = 50, 4, 1000, 200


def made_up(above, share):
    """A run of so many words, whose losses are so far above the dense one's."""
    random = np.random.default_rng(0)
    noise = random.standard_normal(IMAGES)
    over = np.geomspace(2.0, 0.4, STEPS) + above
    return Run(
        size=SIZE,
        accuracy=0.9 - above,
        train_loss=0.3 + above,
        losses=over + 0.05 * random.standard_normal(STEPS),
        words=np.full(STEPS, 2 * share * SIZE),
        selected=np.full((STEPS, WORKERS), share * SIZE),
        delivered=np.full(STEPS, share * SIZE),
        overflow=np.zeros((STEPS, WORKERS)),
        held_out=HeldOut(
            {at: float(over[at - 1]) for at in (1, 10, STEPS)},
            # What the images have in common is much more than the difference.
            0.4 + above + noise + 0.01 * random.standard_normal(IMAGES),
            (noise < 1 - above).astype(float),
        ),
    )


RUNS = {"dense": made_up(0.0, 1.0), "sparse_adamw": made_up(0.1, 0.05)}


def options(*argv):
    return train_digits.parse(["--workers", str(WORKERS), "--steps", str(STEPS), *argv])


def test_differences_are_of_the_same_images():
    row = _report.summary(RUNS, options())["runs"]["sparse_adamw"]
    assert row["loss_above"] == pytest.approx(0.1, abs=0.01)
    assert row["loss_error"] < 0.002
    same = {"dense": RUNS["dense"], "other": RUNS["dense"]}
    assert "within the noise" in _report.remarks(_report.summary(same, options()))[0]


def test_the_figure_goes_to_the_temporary_folder_and_is_named(tmp_path, monkeypatch, capsys):
    runs = iter(RUNS.values())
    monkeypatch.setattr(train_digits, "optimizers", lambda _: dict.fromkeys(RUNS))
    monkeypatch.setattr(train_digits, "train", lambda *_: next(runs))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    before = set(tmp_path.parent.iterdir())
    assert train_digits.main([]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    (figure,) = tmp_path.glob("*/*")
    assert last == f"wrote {figure}"
    with Image.open(figure) as image:
        assert image.width > 600
    assert set(tmp_path.parent.iterdir()) == before


def test_a_run_that_ends_early_leaves_no_folder(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(train_digits, "train", interrupt)
    assert train_digits.main([]) == 130
    assert list(tmp_path.iterdir()) == []
    assert "interrupted" in capsys.readouterr().err


def test_held_out_images_are_the_same_for_all():
    data = digits()
    images, labels = train_digits.noisy(data.test_images, data.test_labels, options())
    again, _ = train_digits.noisy(data.test_images, data.test_labels, options("--seed", "3"))
    np.testing.assert_array_equal(images, again)
    assert len(images) == len(labels) == train_digits.COPIES * len(data.test_images)
    assert options("--data", "folder").noise == 0
    plain, _ = train_digits.noisy(data.test_images, data.test_labels, options("--noise", "0"))
    np.testing.assert_array_equal(plain, data.test_images)


@pytest.mark.slow
def test_digits_reports_what_was_sent_and_writes_a_figure_and_nothing_else(tmp_path):
    figure, numbers = tmp_path / "sub" / "out.png", tmp_path / "numbers.json"
    argv = ["--steps", "40", "--workers", "4", "--out", str(figure), "--json", str(numbers)]
    assert train_digits.main(argv) == 0
    assert list(figure.parent.iterdir()) == [figure]
    numbers = json.loads(numbers.read_text())
    runs = numbers["runs"]
    assert list(runs) == ["dense", "sparse_adamw", "ok_topk"]
    assert runs["ok_topk"]["delivered"] == numbers["k"]
    assert runs["dense"]["words"] == 2 * numbers["n"] * 3 / 4
    for name in ("sparse_adamw", "ok_topk"):
        assert 0 < runs[name]["words"] < numbers["bound"]
        assert runs[name]["test_accuracy"] > 0.5


SGD = ["--optimizer", "sgd", "--density", "0.02", "--noise", "0"]


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory):
    """What the program writes of three seeds, by SGD."""
    folder = tmp_path_factory.mktemp("seeds")
    written = []
    for seed in range(3):
        numbers = folder / f"{seed}.json"
        argv = ["--seed", str(seed), "--out", str(folder / "out.png"), "--json", str(numbers)]
        assert train_digits.main([*argv, *SGD]) == 0
        written.append(json.loads(numbers.read_text())["runs"])
    return written


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["narrow8", "qsgd4"])
def test_digits_with_the_fewest_bits_is_within_a_point_of_raw(codec, three_seeds):
    """Of two seeds: one test image is 0.22 points, and seeds differ by two of them."""
    data, mesh = train_digits.digits(), train_digits.start_workers(8)
    differences = []
    for seed in range(2):
        options = train_digits.parse(["--codec", codec, "--seed", str(seed), *SGD])
        tx = train_digits.optimizers(options)["ok_topk"]
        run = train_digits.train(tx, data, mesh, options, lambda: None)
        differences.append(run.accuracy - three_seeds[seed]["ok_topk"]["test_accuracy"])
    assert np.mean(differences) >= -0.01, differences


@pytest.mark.slow
def test_digits_is_within_a_point_of_dense_over_three_seeds(three_seeds):
    accuracy = {
        name: np.mean([runs[name]["test_accuracy"] for runs in three_seeds])
        for name in ("dense", "sparse_sgd", "ok_topk")
    }
    for runs in three_seeds:
        assert runs["ok_topk"]["selection_error"] <= 0.05
    for name in ("sparse_sgd", "ok_topk"):
        assert accuracy[name] >= accuracy["dense"] - 0.01, accuracy


@pytest.mark.slow
def test_digits_shows_what_a_sparse_step_in_front_of_adam_costs(tmp_path):
    """In few words, and on held-out images: more than by `sparse_adamw`, and neither is chance."""
    numbers = tmp_path / "numbers.json"
    argv = ["--out", str(tmp_path / "out.png"), "--json", str(numbers)]
    assert train_digits.main(argv) == 0
    runs = json.loads(numbers.read_text())["runs"]
    assert runs["sparse_adamw"]["words"] < runs["ok_topk"]["words"] < 0.03 * runs["dense"]["words"]
    assert runs["sparse_adamw"]["accuracy_above"] > -0.02
    assert 0.01 < runs["sparse_adamw"]["loss_above"] < 0.06 < runs["ok_topk"]["loss_above"] < 0.15
    for name in ("sparse_adamw", "ok_topk"):
        assert runs[name]["loss_above"] > 3 * runs[name]["loss_error"]
