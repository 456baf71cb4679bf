"""The examples run as a user runs them."""

import json

import numpy as np
import pytest
from PIL import Image

import train_digits

pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    figure, numbers = folder / "sub" / "out.png", folder / "numbers.json"
    argv = ["--steps", "40", "--workers", "4", "--out", str(figure), "--json", str(numbers)]
    assert train_digits.main(argv) == 0
    return figure, json.loads(numbers.read_text())


@pytest.mark.slow
def test_digits_writes_a_figure_and_nothing_else(quick_run):
    figure, _ = quick_run
    with Image.open(figure) as image:
        assert image.width > 600
        assert len(np.unique(np.asarray(image.convert("L")))) > 20
    assert [path.name for path in figure.parent.iterdir()] == [figure.name]


@pytest.mark.slow
def test_digits_reports_what_was_sent(quick_run):
    _, numbers = quick_run
    runs = numbers["runs"]
    assert list(runs) == ["dense", "sparse_adamw", "ok_topk"]
    assert runs["ok_topk"]["delivered"] == numbers["k"]
    assert runs["dense"]["words"] == 2 * numbers["n"] * 3 / 4
    for name in ("sparse_adamw", "ok_topk"):
        assert 0 < runs[name]["words"] < numbers["bound"]
        assert runs[name]["test_accuracy"] > 0.5


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_file(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("_report.os.replace", interrupt)
    out = tmp_path / "out.png"
    assert train_digits.main(["--steps", "2", "--out", str(out)]) == 130
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.strip().endswith("interrupted")


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
