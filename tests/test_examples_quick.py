"""Each example that a reader would copy runs as it stands, with fewer steps."""

import json
import re
import runpy

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

import checkpoint_reshard
import loop_pmap
import loop_shard_map
import train_multihost
import train_nnx
import train_text
from benchmarks._common.processes import ROOT

EXAMPLES = ROOT / "examples"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
NOTEBOOK = EXAMPLES / "one_step.ipynb"
pytestmark = pytest.mark.usefixtures("default_promotion")


def numbers(pattern, text):
    """What the one group of the pattern matches, wherever it does."""
    return [float(x.replace(",", "")) for x in re.findall(pattern, text)]


def printed(capsys, main, *argv):
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_the_quick_start_learns(capsys):
    runpy.run_path(str(EXAMPLES / "quick_start.py"))
    out = capsys.readouterr().out
    losses = numbers(r"loss ([\d.]+)", out)
    assert len(losses) == 3
    assert losses[-1] < 0.3 < 2.0 < np.log(10)
    assert numbers(r"test accuracy ([\d.]+)%", out)[0] > 95


def test_an_nnx_classifier_is_compared_with_the_dense_one(capsys, tmp_path):
    figure = tmp_path / "loss.png"
    argv = ["--steps", "20", "--batch", "64", "--workers", "4", "--compare", "--out", str(figure)]
    out = printed(capsys, train_nnx.main, *argv)
    assert re.findall(r"^(\w+): test", out, re.MULTILINE) == ["sparse_adamw", "dense"]
    sparse, dense = numbers(r"([\d,]+) words a step", out)
    assert 0 < sparse < 0.03 * dense
    assert min(numbers(r"test accuracy ([\d.]+)%", out)) > 50
    assert max(numbers(r"train loss ([\d.]+)", out)) < np.log(10)
    with Image.open(figure) as image:
        assert image.width > 600


SMALL_TEXT = ["--width", "16", "--layers", "1", "--length", "16", "--batch", "16"]


def test_a_language_model_learns_a_text_of_ones_own(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Was it a rat I saw? Ünä, no: a cat. " * 100, encoding="utf-8")
    argv = ["--text", str(text), *SMALL_TEXT, "--workers", "4", "--steps", "150", "--report", "1"]
    out = printed(capsys, train_text.main, *argv)
    losses = numbers(r"loss ([\d.]+), ", out)
    assert len(losses) == 150
    assert losses[0] > 4  # near log(128): nothing is known of the text yet
    # The frequencies of the characters alone give 2.7.
    assert numbers(r"held-out loss ([\d.]+)", out)[0] < 1.5


@pytest.mark.parametrize("loop", [pytest.param(loop_pmap, marks=pytest.mark.slow), loop_shard_map])
def test_a_loop_of_ones_own_learns(loop, capsys):
    out = printed(capsys, loop.main, "--steps", "30", "--workers", "4")
    losses = numbers(r"loss ([\d.]+)", out)
    assert losses[-1] < 0.3 * losses[0]
    assert numbers(r"test accuracy ([\d.]+)%", out)[0] > 85
    assert "differ" not in out


def test_nothing_that_waits_is_lost_with_other_workers(capsys, tmp_path):
    folder = ["--folder", str(tmp_path / "checkpoint")]
    out = printed(capsys, checkpoint_reshard.main, "--steps", "10", *folder)
    ((old, first, last), (new, again, end)) = (
        map(float, line) for line in re.findall(r"(\d) workers: loss from (\S+) to (\S+)", out)
    )
    assert (old, new) == (8, 4)
    # It goes on where it was, and not from the start.
    assert end < again < first
    assert again < 1.5 * last
    before, after = numbers(r"([\d.]+)(?:,|;) ", out.split("have magnitude")[1])
    assert before == pytest.approx(after, rel=1e-6)
    assert before > 1
    assert numbers(r"at an entry is (\S+)", out)[0] < 1e-8
    assert numbers(r"test accuracy ([\d.]+)%", out)[0] > 60
    # A second run would write over the first.
    with pytest.raises(SystemExit, match="2"):
        checkpoint_reshard.main(folder)
    assert "has a checkpoint already" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_for_several_processes_runs_in_one(capsys):
    out = printed(capsys, train_multihost.main, "--steps", "10", "--report", "1")
    assert "1 processes, 8 workers, ok_topk" in out
    losses = numbers(r"loss ([\d.]+)", out)
    assert losses[-1] < 0.7 * losses[0]


def text_of(outputs):
    return "".join(line for output in outputs for line in output.get("text", []))


# Settings of the notebook's plots are not those of other tests.
@plt.rc_context()
@pytest.mark.parametrize("steps", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_the_notebook_runs_and_prints_what_it_shows(steps, capsys):
    """From top to bottom, in one namespace, as a kernel runs it; with fewer steps in the end."""
    cells = [x for x in json.loads(NOTEBOOK.read_text())["cells"] if x["cell_type"] == "code"]
    assert sum("".join(cell["source"]).count("steps=200") for cell in cells) == 1
    names, figures = {}, 0
    for number, cell in enumerate(cells, 1):
        assert cell["execution_count"] == number
        source = "".join(cell["source"]).replace("steps=200", f"steps={steps}")
        exec(compile(source, f"cell {number}", "exec"), names)
        shown, now = text_of(cell["outputs"]), capsys.readouterr().out
        assert re.sub(NUMBER, "N", now) == re.sub(NUMBER, "N", shown)
        if steps == 200:
            # Another version of jax or of its compiler rounds otherwise.
            assert numbers(f"({NUMBER})", now) == pytest.approx(numbers(f"({NUMBER})", shown), 0.15)
        images = [x["data"]["image/png"] for x in cell["outputs"] if "data" in x]
        assert len(images) == len(plt.get_fignums())
        figures += len(images)
        plt.close("all")
    assert figures == 2
    # Nothing is lost in the one step, and over many steps the residual is what makes the loss.
    np.testing.assert_allclose(names["before"], names["after"], atol=1e-5)
    dense, kept, forgotten = (losses[-20:].mean() for losses, _ in names["runs"].values())
    assert dense < kept < 2 * dense
    assert forgotten > 1.3 * kept


def test_the_list_of_examples_is_whole():
    listed = set(re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text()))
    files = [x for x in EXAMPLES.iterdir() if x.suffix in (".py", ".ipynb")]
    assert {x.name for x in files} <= listed
