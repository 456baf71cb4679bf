"""Loss against seconds: the clock, what is trained and shown, and a run over real links."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks._common.processes import ROOT, environment
from benchmarks.learning import _clock, _over_links, _tasks, _times, time
from benchmarks.training._recorded_training import schedule
from benchmarks.training._small_tasks import word_task
from tests.leftovers import left_by


def test_the_rate_is_that_of_the_other_benchmarks():
    of_steps = schedule(0.3, 1000)
    for step in (0, 1, 25, 49, 50, 51, 400, 999, 1000):
        np.testing.assert_allclose(_clock.rate_at(0.3, step / 1000), of_steps(step), rtol=1e-4)
    assert _clock.rate_at(0.3, 1.1) == _clock.rate_at(0.3, 1.0)


@pytest.mark.parametrize("guess", [0.001, 0.07, 50.0])
@pytest.mark.parametrize("drift", [1.0, 1.0003, 0.9997])
def test_steps_take_the_budget_and_no_more(guess, drift):
    each, seen, measured = [0.07], [], []

    def take(shares):
        seen.extend(shares)
        taken = 0.0
        for _ in shares:
            taken += each[0]
            each[0] *= drift
        return taken

    def measure():
        measured.append(len(seen))
        return float(len(seen))

    curve = _clock.spend(60.0, 4, guess, take, measure)
    assert abs(curve.seconds[-1] - 60) < 0.1
    np.testing.assert_allclose(curve.seconds, [0, 15, 30, 45, 60], atol=0.1)
    assert curve.values == measured == curve.steps
    # The shares are those of the time, and the last step begins when the budget is almost spent.
    assert seen[0] == 0
    assert 0.99 < seen[-1] < 1
    assert np.abs(np.diff(seen)).max() < 0.02


def test_one_step_is_taken_however_long_it_is():
    curve = _clock.spend(1.0, 3, 0.2, lambda shares: 5.0 * len(shares), lambda: 0.0)
    assert curve.steps == [0, 2, 2, 2]
    assert curve.seconds == [0, 10, 10, 10]


def test_a_curve_reaches_a_value_between_its_points():
    seconds, losses = np.array([0.0, 10, 20, 30]), np.array([4.0, 3, 2, 2.5])
    assert _times.when(seconds, losses, 2.5, large=False) == 15
    assert _times.when(seconds, losses, 1.9, large=False) is None
    assert _times.when(seconds, -losses, -4.0, large=True) == 0


@pytest.fixture
def trained(monkeypatch):
    """Runs whose end depends on the rate, in place of real ones; what was run."""
    made = []

    def train(group, args, name, link, rate, seed):
        made.append((name, link, rate, seed))
        end = 2 + abs(rate - 0.01) + (name == "dense") + 0.01 * seed
        curve = {"seconds": [0, 5.0, 10.0], "steps": [0, 50, 100], "values": [4.0, 3.5, end]}
        curve |= {"size": 1000, "parts": [[60, 0.1], [40, 0.15]]}
        return {"value": end, "steps": 100, "received": 5e5, "curve": curve}

    class Hosts:
        def limit(self, link):
            del link

    monkeypatch.setattr(time, "_train", train)
    monkeypatch.setattr(time, "started", lambda *_: contextlib.nullcontext(lambda name: None))
    monkeypatch.setattr(time, "interrupt_when_told", lambda: None)
    monkeypatch.setattr(time.namespaces, "unusable", lambda: None)
    monkeypatch.setattr(time.namespaces, "network", lambda _: contextlib.nullcontext(Hosts()))
    return made


def test_runs_are_kept_and_not_made_again(tmp_path, trained, capsys):
    runs, figure = tmp_path / "runs", tmp_path / "figure.png"
    arguments = ["--runs", str(runs), "--rates", "0.002", "0.01", "--seeds", "2"]
    arguments += ["--link", "100mbit", "1gbit", "--seconds", "10", "--only", "dense"]
    arguments += ["--options", "gain=2"]
    assert time.main([*arguments, "--plot", str(figure)]) == 0
    expected = [(0.002, 0), (0.01, 0), (0.01, 1)]
    assert trained == [
        (name, link, *run)
        for name in ("dense", "sparse_adamw gain=2")
        for link in ("100mbit", "1gbit")
        for run in expected
    ]
    table = capsys.readouterr().out
    assert "words, n = 1,000, P = 4, 1gbit, 10 s" in table
    # From 3.5 after 5 s to 2.005 in the mean after 10 s: at 3.005, dense's end, after 6.66 s.
    line = next(line for line in table.splitlines() if line.startswith("sparse_adamw gain=2"))
    assert line.split()[2:] == ["0.01", "2", "2.005", "0.007", "-33.28", "6.7", "s", "100.0",
                                "100.0", "-", "150.0", "0.500", "100"]  # fmt: skip
    assert figure.read_bytes().startswith(b"\x89PNG")
    lines = runs.read_text().splitlines(keepends=True)
    runs.write_text("".join(lines[:-1]))
    assert time.main(arguments) == 0
    assert capsys.readouterr().out == table
    assert len(trained) == len(lines) + 1
    assert time.main([*arguments, "--show"]) == 0
    assert capsys.readouterr().out == table


def test_all_are_contestants():
    names = list(_over_links.contestants())
    assert names[:4] == ["dense", "dense, float16", "sparse_adamw", "ok_topk before AdamW"]
    for make in _over_links.contestants().values():
        assert callable(make(lambda count: 0.1).update)


def test_pytorch_has_the_same_networks():
    """The same loss and gradients, from the same parameters and batch."""
    torch = pytest.importorskip("torch", reason="PyTorch is installed by hand: it is large")
    from benchmarks.learning import _torch_models

    text = " ".join(f"word{i % 97} of {i * i % 89}," for i in range(3000))
    for name, loss in _torch_models.LOSSES.items():
        task = _tasks.make(name, 16, None, None) if name == "text" else word_task(text, width=16)
        params, batch = task.init(0), task.batch_of(np.arange(4) * 50)
        with jax.numpy_rank_promotion("allow"):
            value, gradients = jax.value_and_grad(task.loss)(params, batch)
        leaves, tree = jax.tree.flatten(params)
        given = [torch.from_numpy(np.array(leaf)).requires_grad_() for leaf in leaves]
        found = loss(tree.unflatten(given), tuple(torch.from_numpy(x).long() for x in batch))
        found.backward()
        np.testing.assert_allclose(found.item(), value, rtol=1e-5)
        for leaf, expected in zip(given, jax.tree.leaves(gradients), strict=True):
            # Sums of float32 in another order; entries that cancel have no digits of their own.
            largest = float(np.abs(expected).max())
            np.testing.assert_allclose(leaf.grad, expected, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "x"], "--only 'x' is none of: dense"),
        (["--workers", "3"], "--batch 32 can't be dealt out to 3 workers"),
        (["--link", "fast"], "'fast' is not a link"),
        (["--task", "images"], "invalid choice: 'images'"),
        (["--options", "rate=1"], "--options: sparse_adamw has no 'rate' here"),
        (["--options", "gain=2", "density=2"], "--options: density"),
        (["--show"], "--show needs --runs FILE"),
        (["--task", "lstm", "--only", "PyTorch, dense"], "needs PyTorch (pip install torch), and"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        time.main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_root_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(time, "interrupt_when_told", lambda: None)
    monkeypatch.setattr(time.namespaces, "unusable", lambda: "network namespaces need root")
    assert time.main([]) == 2
    assert capsys.readouterr().err == "time: network namespaces need root\n"


def started(*argv):
    # Unoptimised machine code compiles fastest, and nothing here is a time.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    small = ["--workers", "2", "--batch", "4", "--width", "4", "--seconds", "2", "--points", "2"]
    command = [sys.executable, "-m", "benchmarks.learning.time", *small, *argv]
    variables = environment() | {"XLA_FLAGS": flags}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
def test_a_run_over_real_links_learns_and_sends_what_it_should(tmp_path):
    runs = tmp_path / "runs"
    argv = ["--link", "100mbit", "--rates", "0.05", "--runs", str(runs)]
    argv += ["--only", "dense", "dense, float16", "sparse_adamw", "--options", "density=0.5"]
    running = started(*argv)
    printed, errors = running.communicate()
    assert running.returncode == 0, errors
    assert left_by(running.pid) == set()
    found = {run["contestant"]: run for run in map(json.loads, runs.read_text().splitlines())}
    assert list(found) == ["dense", "dense, float16", "sparse_adamw", "sparse_adamw density=0.5"]
    for name, run in found.items():
        curve = run["curve"]
        assert curve["values"][-1] < curve["values"][0] - 0.1, name
        assert len(curve["seconds"]) == len(curve["steps"]) == 3
        assert name in printed
    # Half the bits are half the bytes, and what is around each message.
    size = found["dense"]["curve"]["size"]
    assert 4 * size < found["dense"]["received"] < 4.4 * size
    assert 2 * size < found["dense, float16"]["received"] < 2.4 * size
    assert found["sparse_adamw"]["received"] < 0.5 * size


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
def test_an_interrupted_run_leaves_nothing():
    running = started("--only", "dense")
    assert "starting" in running.stderr.readline()
    assert left_by(running.pid)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate()
    assert running.returncode == 130
    assert errors.strip().endswith("interrupted")
    assert left_by(running.pid) == set()
