"""Loss against steps and against seconds: trainings, stored runs and tables."""

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse_collectives as sc
from benchmarks._common import options
from benchmarks.learning import (
    _clock,
    _contestants,
    _optimizers,
    _tasks,
    optimizers,
    step_times,
    steps,
    time,
)
from benchmarks.learning._contestants import AXIS, DENSE, NOTHING, contestants
from benchmarks.training._simulated_training import Curve, start_of, train
from benchmarks.training._small_tasks import word_task
from tests.programs import refused

# The models are a user's: they add a bias to a batch.
pytestmark = pytest.mark.usefixtures("default_promotion")
SMALL = ["--workers", "2", "--steps", "4", "--points", "2", "--width", "8", "--batch", "4"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    return ["--text", str(path)]


def row_of(table, name):
    """The cells of a line, with lists split; the name may contain spaces."""
    line = next(line for line in table.splitlines() if line.startswith(f"{name}  "))
    return [name, *line.removeprefix(name).replace(",", "").split()]


def without_links(monkeypatch, program, group_of):
    """No network is made and no process started."""
    hosts = SimpleNamespace(limit=lambda link: None)
    monkeypatch.setattr(time, "started", lambda *_: contextlib.nullcontext(group_of))
    monkeypatch.setattr(options, "interrupt_when_told", lambda: None)
    monkeypatch.setattr(program.namespaces, "unusable", lambda: None)
    monkeypatch.setattr(program.namespaces, "network", lambda _: contextlib.nullcontext(hosts))


# Stored runs, of fake trainings whose results depend on the learning rate.


@pytest.fixture
def of_steps(monkeypatch):
    """The labels of the trainings; the second of their rates is the better one."""
    labels = []

    def train(task, make, *, rates, seeds, steps, label, **_):
        labels.append(label)
        values = {(r, s): abs(r - 0.05) + 0.001 * s + 1.0 for r in rates for s in seeds}
        return {key: Curve([0, steps], [4.0, x], [x], 100.0, 0.1) for key, x in values.items()}

    monkeypatch.setattr(steps, "train", train)
    return labels


@pytest.fixture
def of_seconds(monkeypatch):
    """The trainings."""
    made = []

    def train(group, args, case, rate, seed):
        made.append((case["contestant"], case["link"], rate, seed))
        end = 2 + abs(rate - 0.01) + (case["contestant"] == "dense") + 0.01 * seed
        curve = {"seconds": [0, 5.0, 10.0], "steps": [0, 50, 100], "values": [4.0, 3.5, end]}
        curve |= {"size": 1000, "parts": [[60, 0.1], [40, 0.15]]}
        return {"value": end, "steps": 100, "received": 5e5, "curve": curve}

    monkeypatch.setattr(time, "_train", train)
    without_links(monkeypatch, time, lambda name: None)
    return made


def test_runs_of_steps_are_kept_and_not_made_again(tmp_path, text, of_steps, capsys):
    runs, figure = tmp_path / "runs", tmp_path / "figure.png"
    arguments = [*SMALL, *text, "--runs", str(runs), "--only", DENSE, "sparse_adamw"]
    arguments += ["--rates", "0.01", "0.05", "--seeds", "2"]

    def printed(*more):
        assert steps.main([*arguments, *more]) == 0
        return capsys.readouterr().out

    table = printed()
    # Both learning rates with seed 0, and the better one with seed 1, for both contestants.
    made = [f"{name} at {x}" for name in (DENSE, "sparse_adamw") for x in (0.01, 0.05, 0.05)]
    assert of_steps == made
    assert row_of(table, "sparse_adamw")[:4] == ["sparse_adamw", "2", "0.05", "2"]
    # Only the run whose line was cut off is made again.
    lines = runs.read_text().splitlines(keepends=True)
    assert [json.loads(line)["seed"] for line in lines] == [0, 0, 1] * 2
    runs.write_text("".join(lines[:-1]) + lines[-1][:20])
    assert printed() == table
    assert len(of_steps) == 7
    assert printed("--show") == table
    assert printed("--steps", "5", "--show").endswith("nothing\n")
    # A dense run is the same for every share; only the runs of `sparse_adamw` are new.
    printed("--share", "0.1")
    assert of_steps[7:] == made[3:]
    # Neighbours are contestants with a name of their own, whatever the order of their options, and
    # `--show` also lists those that are not named.
    printed("--options", "gain=2.0", "b2=0.999", "--plot", str(figure))
    name = "sparse_adamw b2=0.999 gain=2"
    assert of_steps[10:] == [f"{name} at {rate}" for rate in (0.01, 0.05, 0.05)]
    assert figure.read_bytes().startswith(b"\x89PNG")
    printed("--options", "b2=0.999", "gain=2")
    assert len(of_steps) == 13
    assert row_of(printed("--show"), name)[1:4] == ["2", "0.05", "2"]


def test_runs_over_links_are_kept_and_not_made_again(tmp_path, of_seconds, capsys):
    runs, figure = tmp_path / "runs", tmp_path / "figure.png"
    arguments = ["--runs", str(runs), "--rates", "0.002", "0.01", "--seeds", "2"]
    arguments += ["--link", "100mbit", "1gbit", "--seconds", "10", "--only", "dense"]
    arguments += ["--options", "gain=2"]
    assert time.main([*arguments, "--plot", str(figure)]) == 0
    cases = itertools.product(("dense", "sparse_adamw gain=2"), ("100mbit", "1gbit"))
    expected = [(0.002, 0), (0.01, 0), (0.01, 1)]
    assert of_seconds == [(*case, *run) for case in cases for run in expected]
    table = capsys.readouterr().out
    assert "words, n = 1,000, P = 4, 1gbit, 10 s" in table
    # The mean goes from 3.5 after 5 s to 2.005 after 10 s: it is 3.005, dense's end, after 6.66 s.
    numbers = ["0.01", "2", "2.005", "0.007071", "-33.28", "6.656", "100", "100", "150", "0.5"]
    assert row_of(table, "sparse_adamw gain=2")[1:] == [*numbers, "100"]
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert time.main(arguments) == 0
    assert capsys.readouterr().out == table
    assert len(of_seconds) == 12


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n{}\n", "line 1 is no run of this program: no 'task'"),
        (b"x\n{}\n", "line 1 is no JSON"),
        (b"\xff\n", "cannot read"),
    ],
)
def test_runs_in_another_file_are_one_line(tmp_path, content, message, capsys):
    path = tmp_path / "runs"
    path.write_bytes(content)
    assert message in refused(steps.main, ["--runs", str(path), "--show"], capsys)


def test_contestants_can_all_be_made():
    made = [make(0.1, 9).exchange for x in _tasks.KINDS for make in contestants(x, 0.5).values()]
    groups = _contestants.over_links().values()
    made += [make(lambda count: 0.1) for group in groups for make in group.values()]
    assert all(callable(tx.update) for tx in made)


# The clock of seconds.


def test_learning_rate_comes_to_its_end_with_the_budget():
    rates = _clock.rates_at(0.3, [0.0, 0.025, 0.05, 1.0, 1.1])
    np.testing.assert_allclose(rates, [0.015, 0.1575, 0.3, 0.003, 0.003], rtol=1e-5)


@pytest.mark.parametrize("guess", [0.001, 0.07, 50.0])
@pytest.mark.parametrize("drift", [1.0, 1.0003, 0.9997])
def test_steps_take_the_budget_and_no_more(guess, drift):
    each, seen, measured = [0.07], [], []

    def take(shares):
        seen.extend(shares)
        taken = each[0] * drift ** np.arange(len(shares))
        each[0] = taken[-1] * drift
        return float(taken.sum())

    def measure():
        measured.append(len(seen))
        return float(len(seen))

    curve = _clock.spend(60.0, 4, guess, take, measure)
    assert abs(curve.seconds[-1] - 60) < 0.1
    np.testing.assert_allclose(curve.seconds, [0, 15, 30, 45, 60], atol=0.1)
    assert curve.values == measured == curve.steps
    # The shares are shares of the time; the last step begins when the budget is almost spent.
    assert seen[0] == 0
    assert 0.99 < seen[-1] < 1
    assert np.abs(np.diff(seen)).max() < 0.02


@pytest.mark.slow
def test_pytorch_has_the_same_networks():
    """The same loss and gradients, from the same parameters and batch."""
    torch = pytest.importorskip("torch", reason="PyTorch is installed by hand: it is large")
    from benchmarks.learning import _torch_trainer

    text = " ".join(f"word{i % 97} of {i * i % 89}," for i in range(3000))
    for name, loss in _torch_trainer.LOSSES.items():
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
            # Sums of float32 in another order; entries that cancel have no exact digits.
            largest = float(np.abs(expected).max())
            np.testing.assert_allclose(leaf.grad, expected, rtol=1e-4, atol=1e-5 * largest)


# Steps over links.


def test_step_times_are_those_of_the_slowest_worker(monkeypatch, capsys, tmp_path):
    times = {name: [8.0, 8.0] for name in step_times.GROUPS["buckets"]}
    times |= {"nothing exchanged": [2.0, 4.0], "dense, 4 buckets": [5.0, 10.0]}

    def ask(do, *, contestant, warmup, **_):
        assert (do, warmup) == ("begin", 7)
        return [{"seconds": 0.5}, {"seconds": times[contestant].pop(0)}]

    without_links(monkeypatch, step_times, lambda name: SimpleNamespace(ask=ask))
    arguments = ["--group", "buckets", "--link", "1gbit", "--rounds", "2", "--steps", "7"]
    assert step_times.main([*arguments, "--json", str(tmp_path / "times.json")]) == 0
    assert not any(times.values())
    table = capsys.readouterr().out
    # Buckets hide 50 % of the exchange of 6 seconds, and add 50 % to the exchange of 4 seconds.
    numbers = ["7500", "1.2", "0.8", "1.6", "0", "-0.5", "0.5"]
    assert row_of(table, "dense, 4 buckets")[1:] == numbers
    assert row_of(table, "nothing exchanged")[1:] == ["3000", "3", "2", "4", "-"]
    assert (tmp_path / "times.json").exists()


def test_contestant_that_exchanges_nothing_computes_all_of_the_gradient():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
    tx = _contestants.over_links()["buckets"][NOTHING](lambda count: 0.1)

    def step(scale):
        update, _ = tx.update(jax.tree.map(lambda x: scale * x, tree), tx.init(tree), tree)
        return update

    update = sc.simulate(step, axis=AXIS, axis_size=3)(jnp.arange(3.0))
    assert jax.tree.map(jnp.shape, update) == {"a": (3, 2, 3), "b": (3, 4)}
    assert all((np.asarray(leaf) == np.asarray(leaf)[0]).all() for leaf in jax.tree.leaves(update))


@pytest.mark.slow
@pytest.mark.parametrize("name", [DENSE, "sparse_adamw"])
def test_grid_has_the_losses_of_single_trainings(text, name):
    """Sums are in another order, so another entry may be the last one above a threshold.

    At a rate of 0.05 that moves the loss of this text by up to 0.6 % in six steps.
    """
    tolerance = 1e-5 if name == DENSE else 3e-3
    task, make = _tasks.make("text", 8, Path(text[1]), None), contestants("text")[name]
    given = {"workers": 2, "steps": 6, "every": 3, "batch": 4, "label": name}
    grid = {"rates": [0.005, 0.01], "seeds": [0, 2], **given}
    found, each = (train(task, make, together=x, **grid) for x in (True, False))
    assert list(found) == [(0.005, 0), (0.005, 2), (0.01, 0), (0.01, 2)]
    for key, curve in found.items():
        alone = each[key]
        assert curve.steps == alone.steps
        np.testing.assert_allclose(curve.values, alone.values, rtol=tolerance)
        np.testing.assert_allclose(curve.losses, alone.losses, rtol=tolerance)
        assert curve.words == alone.words
    assert len({curve.values[-1] for curve in found.values()}) == 4


@pytest.mark.parametrize("task", ["text-apart", "images-apart"])
def test_workers_apart_share_no_example_and_a_dense_run_has_the_same(task, text):
    made = _tasks.make(task, 8 if task.startswith("text") else None, Path(text[1]), None)
    workers, drawn = _tasks.PARTS, np.random.default_rng(0).integers(0, made.count, (5, 8, 4))
    batches = made.batch_of(drawn)
    whole = made.batch_of(drawn.reshape(5, 1, 8 * 4))
    for mine, other in zip(batches, whole, strict=True):
        np.testing.assert_array_equal(mine.reshape(5, 1, 32, *mine.shape[3:]), other)
    if task.startswith("images"):
        # 1,797 digits of ten classes in eight parts.
        classes = [set(batches[1][:, worker].ravel().tolist()) for worker in range(workers)]
        assert max(map(len, classes)) <= 3
        assert set.union(*classes) > classes[0]


def test_grid_is_stored_by_rate_and_seed(tmp_path, text, of_steps):
    """All pairs of a contestant are trained together, and only if one of them is missing."""
    argv = [*SMALL, *text, "--together", "--rates", "0.1", "0.2", "--seeds", "2"]
    argv += ["--runs", str(tmp_path / "runs"), "--only", DENSE, "sparse_adamw"]
    steps.main(argv)
    steps.main(argv)
    assert of_steps == [DENSE, "sparse_adamw"]
    runs = [json.loads(line) for line in (tmp_path / "runs").read_text().splitlines()]
    keys = [(run["rate"], run["seed"]) for run in runs[:4]]
    assert keys == [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]
    assert [run["value"] for run in runs[:4]] == pytest.approx([1.05, 1.051, 1.15, 1.151])


@pytest.mark.parametrize("exchange", [_optimizers.DENSE, _optimizers.INSIDE])
def test_schedule_free_is_evaluated_at_its_average(exchange):
    variant = optimizers.variant("schedule_free", exchange, 0.1, 20)
    params = {"w": jnp.full(4, 2.0)}
    params, *states = start_of(variant, params, 2)
    at = states.index(next(x for x in states if isinstance(x, optax.contrib.ScheduleFreeState)))
    states[at] = states[at]._replace(z=jax.tree.map(jnp.ones_like, states[at].z))
    found = variant.evaluated(params, *states)
    np.testing.assert_allclose(found["w"], (2 - 0.1) / 0.9, rtol=1e-6)
