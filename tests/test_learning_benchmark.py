"""Loss against steps: what is trained, kept and shown, on a tiny text."""

import json

import jax
import numpy as np
import pytest

from benchmarks.learning import _tasks, steps
from benchmarks.learning._contestants import DENSE, contestants
from benchmarks.learning._neighbours import neighbour
from benchmarks.training import _small_tasks, _text_models
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


def test_neighbours_are_contestants_with_a_name_of_their_own(tmp_path, text, trained, capsys):
    runs, figure = tmp_path / "runs", tmp_path / "figure.png"
    arguments = [*SMALL, *text, "--runs", str(runs), "--only", DENSE, "--rates", "0.05"]
    arguments += ["--seeds", "2", "--options", "gain=2.0", "b2=0.999", "--plot", str(figure)]
    assert steps.main(arguments) == 0
    name = "sparse_adamw b2=0.999 gain=2"
    assert trained == [f"{each} at 0.05" for each in (DENSE, name) for _ in range(2)]
    assert figure.read_bytes().startswith(b"\x89PNG")
    # In another order it is the same; and what is in the file is shown without being named.
    arguments = arguments[: arguments.index("--options")]
    assert steps.main([*arguments, "--options", "b2=0.999", "gain=2"]) == 0
    assert len(trained) == 4
    capsys.readouterr()
    assert steps.main([*arguments, "--show"]) == 0
    assert f"{name}    2  0.05      2" in capsys.readouterr().out


def test_a_neighbour_has_the_options_that_it_is_named_for():
    given = [("step_ahead", 0.05), ("bits", "few"), ("dense_below", 64), ("density", 0.02)]
    for task, more in (("words", [("gain", 2), ("eps", 1e-6)]), ("images", [("momentum", 0.5)])):
        name, make = neighbour(task, 1.0, [*given, *more])
        assert all(f" {key}={value}" in name for key, value in given + more)
        assert callable(make(0.1, 10).exchange.update)


def test_a_dense_run_is_the_same_for_every_share(tmp_path, text, trained, capsys):
    arguments = [*SMALL, *text, "--runs", str(tmp_path / "runs"), "--rates", "0.05"]
    arguments += ["--seeds", "1", "--only", DENSE, "ok_topk before AdamW"]
    assert steps.main(arguments) == 0
    assert steps.main([*arguments, "--share", "0.1"]) == 0
    assert len(trained) == 3


def test_the_network_of_words_has_sparse_gradients_and_an_exact_loss():
    network = _text_models.words(width=4)
    params = network.init(0)
    tokens = np.random.default_rng(1).integers(0, 200, (2, _text_models.WORDS + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    loss, gradient = jax.jit(jax.value_and_grad(network.loss))(params, batch)
    used = np.unique(tokens[:, :-1])
    rows = np.flatnonzero(np.abs(gradient["embedding"]).sum(1))
    np.testing.assert_array_equal(rows, used)
    # Only groups of what is to be found.
    groups = np.flatnonzero(np.abs(gradient["members"]).sum((1, 2)))
    assert set(groups) == set(tokens[:, _text_models.BEFORE :].ravel() // _text_models.MEMBERS)
    # The loss by hand: the probabilities of all words add up to one.
    p = jax.tree.map(np.asarray, params)
    losses = []
    for row in tokens:
        for i in range(_text_models.BEFORE, len(row)):
            x = p["embedding"][row[i - _text_models.BEFORE : i]].ravel()
            x = np.asarray(jax.nn.gelu(x @ p["hidden"]["kernel"] + p["hidden"]["bias"]))
            x = x @ p["state"]["kernel"] + p["state"]["bias"]
            group, member = np.exp(x @ p["group"]["kernel"]), np.exp(p["members"] @ x)
            every = (group / group.sum())[:, None] * member / member.sum(1, keepdims=True)
            np.testing.assert_allclose(every.sum(), 1, rtol=1e-5)
            losses.append(-np.log(every.ravel()[row[i]]))
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_the_lstm_does_not_look_ahead():
    network = _text_models.lstm(7, cells=4)
    params = network.init(0)
    tokens = np.random.default_rng(3).integers(0, 7, (1, 12))
    changed = tokens.copy()
    changed[0, 8] = (tokens[0, 8] + 1) % 7
    apply = jax.jit(network.apply)
    before, after = (np.asarray(apply(params, x)) for x in (tokens, changed))
    np.testing.assert_allclose(before[0, :8], after[0, :8], atol=1e-6)
    assert (np.abs(before[0, 8:] - after[0, 8:]).max(1) > 1e-5).all()


def test_words_are_numbered_by_how_frequent_they_are():
    text = "The cat, the dog; the cat's THE " * 30
    task = _small_tasks.word_task(text, windows=64, width=2)
    inputs, labels = task.batch_of(np.array([0]))
    # "the" is the first; "," and ";" are words; "cat's" is one, too.
    np.testing.assert_array_equal(inputs[0, 1:], labels[0, :-1])
    assert inputs[0, [0, 3, 6, 8]].tolist() == [0, 0, 0, 0]
    assert len(set(inputs[0, :8].tolist())) == 6


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lstm", "words", "images-adamw"])
def test_each_task_learns(task, capsys):
    arguments = ["--task", task, "--workers", "2", "--points", "2", "--batch", "8", "--steps", "60"]
    if task != "images-adamw":
        arguments += ["--width", "8"]
    assert steps.main([*arguments, "--only", DENSE, "--rates", "0.02", "--seeds", "1"]) == 0
    value = float(capsys.readouterr().out.splitlines()[-1].split()[4])
    # From the logarithms of the alphabet and of the vocabulary, and of a tenth right.
    assert {"lstm": value < 3.8, "words": value < 7, "images-adamw": value > 50}[task]


def test_contestants_train_on_all_tasks():
    for task in _tasks.KINDS:
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
        (["--options", "gain"], "gain is not NAME=VALUE"),
        (["--options", "rate=1"], "--options: sparse_adamw has no 'rate' here: it has density"),
        (["--task", "images", "--options", "b2=0.9"], "sparse_sgd has no 'b2' here"),
        (["--options", "density=2"], "--options: density"),
        (["--options", "step_ahead=x"], "--options: step_ahead"),
        (["--task", "images", "--width", "8"], "--width: the model of images has one width"),
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
