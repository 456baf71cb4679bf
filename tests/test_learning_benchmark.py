"""Loss against steps: what is trained, kept and shown, on a tiny text."""

import json

import pytest

from benchmarks.learning import steps
from benchmarks.learning._contestants import DENSE, contestants
from benchmarks.training._simulated_training import Curve

# The models are a user's: they add a bias to a batch.
pytestmark = pytest.mark.usefixtures("default_promotion")
SMALL = ["--workers", "2", "--steps", "4", "--points", "2", "--width", "8", "--batch", "4"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    return ["--text", str(path)]


@pytest.fixture
def trained(monkeypatch):
    """A training whose result depends on the rate, in place of the real one; its labels."""
    labels = []

    def train(task, variant, *, steps, seeds, label, **options):
        del task, variant, options
        labels.append(label)
        rate = float(label.rpartition(" ")[2])
        # The second rate is the better one.
        value = abs(rate - 0.05) + 0.001 * seeds[0] + 1.0
        return [Curve([0, steps], [4.0, value], [value], 100.0, 0.1)]

    monkeypatch.setattr(steps, "train", train)
    return labels


def test_runs_are_kept_and_not_made_again(tmp_path, text, trained, capsys):
    runs = tmp_path / "runs"
    arguments = [*SMALL, *text, "--runs", str(runs), "--only", DENSE, "sparse_adamw"]
    arguments += ["--rates", "0.01", "0.05", "--seeds", "2"]
    assert steps.main(arguments) == 0
    table = capsys.readouterr().out
    # Both rates from seed 0, and the better one from seed 1, of both.
    assert trained == [
        f"{name} at {rate}" for name in (DENSE, "sparse_adamw") for rate in (0.01, 0.05, 0.05)
    ]
    assert "sparse_adamw    2  0.05      2" in table
    assert "% of the loss" in table
    # A line that was cut off is made again, and no other.
    lines = runs.read_text().splitlines(keepends=True)
    assert [json.loads(line)["seed"] for line in lines] == [0, 0, 1] * 2
    runs.write_text("".join(lines[:-1]) + lines[-1][:20])
    assert steps.main(arguments) == 0
    assert capsys.readouterr().out == table
    assert len(trained) == 7
    # It is still a file of whole lines.
    assert steps.main([*arguments, "--show"]) == 0
    assert capsys.readouterr().out == table
    assert len(trained) == 7


@pytest.mark.slow
def test_a_run_learns(text, capsys):
    arguments = [*SMALL, *text, "--only", "sparse_adamw", "--rates", "0.05", "--seeds", "1"]
    assert steps.main([*arguments, "--steps", "40"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line[:4] == ["sparse_adamw", "2", "0.05", "1"]
    # From log(29), about 3.4.
    assert float(line[4]) < 2.9


def test_contestants_train_on_both_tasks():
    for task in ("text", "images"):
        for make in contestants(task, share=0.5).values():
            variant = make(0.1, 10)
            assert callable(variant.exchange.update)
            assert callable(variant.optimizer.update)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "x"], "--only 'x' is none of: dense"),
        (["--workers", "3"], "--batch 32 can't be dealt out to 3 workers"),
        (["--width", "30"], "--width 30 can't be divided into 4 heads"),
        (["--show"], "--show needs --runs FILE"),
        (["--rates", "0"], "0 is not a positive number"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        steps.main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n{}\n", "line 1 is no run of this program: no 'task'"),
        ("[1]\n[1]\n", "line 1 is no run of this program"),
        ("x\n{}\n", "line 1 is no JSON"),
        (b"\xff\n", "cannot read"),
    ],
)
def test_another_file_is_one_line(tmp_path, content, message, capsys):
    path = tmp_path / "runs"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert steps.main(["--runs", str(path), "--show"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
