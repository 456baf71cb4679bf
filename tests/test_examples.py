"""Each example that a reader would copy runs as it is, with fewer steps.

The demo, train_digits.py, reports on made-up runs and on real ones.
"""

import json
import re
import subprocess
import sys
from unittest.mock import Mock

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

import _report
import train_digits
from _data import digits
from _report import HeldOut, Run
from benchmarks._common.processes import ROOT

pytestmark = pytest.mark.usefixtures("default_promotion")

EXAMPLES = ROOT / "examples"
NUMBER = r"\d[\d,]*(?:\.\d+)?"


def numbers(pattern, text):
    """The numbers that the pattern's one group matches."""
    return [float(x.replace(",", "")) for x in re.findall(pattern, text)]


def printed(capsys, main, options):
    assert main(options.split()) == 0
    return capsys.readouterr().out


# The settings of the notebook's plots do not change other tests.
@plt.rc_context()
@pytest.mark.slow
def test_notebook_runs_and_prints_what_it_shows(capsys):
    """It runs from top to bottom in one namespace, as in a kernel."""
    cells = json.loads((EXAMPLES / "one_step.ipynb").read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    names, figures = {}, 0
    for number, (cell, source) in enumerate(zip(cells, sources), 1):
        assert cell["execution_count"] == number
        exec(source, names)
        now = capsys.readouterr().out
        shown = "".join(line for output in cell["outputs"] for line in output.get("text", []))
        assert re.sub(NUMBER, "N", now) == re.sub(NUMBER, "N", shown)
        # Another version of jax or of its compiler rounds differently.
        assert numbers(f"({NUMBER})", now) == pytest.approx(numbers(f"({NUMBER})", shown), 0.15)
        images = [x["data"]["image/png"] for x in cell["outputs"] if "data" in x]
        assert len(images) == len(plt.get_fignums())
        figures += len(images)
        plt.close("all")
    assert figures == 2
    # Nothing is lost in the one step, and over many steps the residual lowers the loss.
    np.testing.assert_allclose(names["before"], names["after"], atol=1e-5)
    dense, kept, forgotten = (losses[-20:].mean() for losses, _ in names["runs"].values())
    assert dense < kept < 2 * dense
    assert forgotten > 1.3 * kept


@pytest.mark.slow
def test_two_sites_train_together(tmp_path):
    program, names = EXAMPLES / "two_sites.py", ("berlin", "paris")
    command = [sys.executable, program, tmp_path / "store"]
    running = [
        subprocess.Popen([*command, name, "--rounds", "8"], stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    for name, process in zip(names, running, strict=True):
        lines = process.communicate()[0].splitlines()
        assert process.returncode == 0
        found = [re.fullmatch(rf"{name}, round (\d) of (.*): accuracy (.*)", x) for x in lines]
        assert [x[1] for x in found] == [str(i) for i in range(1, 9)]
        assert {x[2] for x in found} == {"berlin, paris"}
        assert float(found[-1][3]) > 0.85


def test_list_of_examples_is_whole():
    listed = set(re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text()))
    files = [x for x in EXAMPLES.iterdir() if x.suffix in (".py", ".ipynb")]
    assert {x.name for x in files} <= listed


# The demo.

STEPS, WORKERS, SIZE, IMAGES = 50, 4, 1000, 200


def made_up(above, share):
    """A run with this share of the words, whose losses are this far above the dense run's."""
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
            # The noise that all runs share is much larger than their difference.
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


def test_digits_explains_a_gap_to_dense_in_a_short_run():
    def explained(runs, steps):
        given = _report.summary(runs, options("--steps", str(steps)))
        return f"{steps} steps are a short run" in "".join(_report.remarks(given))

    assert explained(RUNS, 400)
    assert not explained(RUNS, 2000)
    assert not explained({"dense": RUNS["dense"], "other": RUNS["dense"]}, 400)


def test_digits_names_its_figure_in_the_temporary_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_digits, "optimizers", lambda _: dict.fromkeys(RUNS))
    monkeypatch.setattr(train_digits, "train", Mock(side_effect=RUNS.values()))
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


def test_digits_that_ends_early_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(train_digits, "train", Mock(side_effect=KeyboardInterrupt))
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


SGD = ["--optimizer", "sgd", "--density", "0.02", "--noise", "0"]


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory):
    """The program's results for three seeds, with SGD."""
    folder = tmp_path_factory.mktemp("seeds")
    files = [folder / f"{seed}.json" for seed in range(3)]
    for seed, file in enumerate(files):
        argv = ["--seed", str(seed), "--out", str(folder / "out.png"), "--json", str(file)]
        assert train_digits.main([*argv, *SGD]) == 0
    return [json.loads(file.read_text())["runs"] for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["narrow8", "qsgd4"])
def test_digits_with_the_fewest_bits_is_within_a_point_of_raw(codec, three_seeds):
    """The mean of two seeds: one test image is 0.22 points, and seeds differ by two of them."""
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
    for runs in three_seeds:
        assert runs["ok_topk"]["selection_error"] <= 0.05
    dense, *sparse = (
        np.mean([runs[name]["test_accuracy"] for runs in three_seeds])
        for name in ("dense", "sparse_sgd", "ok_topk")
    )
    assert min(sparse) >= dense - 0.01, (dense, sparse)
