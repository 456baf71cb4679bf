"""Loss against steps and against seconds: trainings, stored runs and tables."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from benchmarks._common import options
from benchmarks.learning import _clock, _contestants, _tasks, step_times, steps, time
from benchmarks.learning._contestants import AXIS, DENSE, NOTHING, contestants
from benchmarks.training._grid_training import train_grid
from benchmarks.training._simulated_training import Curve, train
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


@pytest.fixture
def of_steps(monkeypatch):
    """A fake training whose result depends on the learning rate; returns its labels."""
    labels = []

    def train(task, variant, *, steps, seeds, label, **_):
        del task, variant
        labels.append(label)
        rate = float(label.rpartition(" ")[2])
        # The second rate is the better one.
        value = abs(rate - 0.05) + 0.001 * seeds[0] + 1.0
        return [Curve([0, steps], [4.0, value], [value], 100.0, 0.1)]

    monkeypatch.setattr(steps, "train", train)
    return labels


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


@pytest.fixture
def of_seconds(monkeypatch):
    """Fake runs whose end depends on the learning rate; returns a list of them."""
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
    runs = tmp_path / "runs"
    arguments = [*SMALL, *text, "--runs", str(runs), "--only", DENSE, "sparse_adamw"]
    arguments += ["--rates", "0.01", "0.05", "--seeds", "2"]
    assert steps.main(arguments) == 0
    table = capsys.readouterr().out
    # Both learning rates with seed 0, and the better one with seed 1, for both contestants.
    assert of_steps == [
        f"{name} at {rate}" for name in (DENSE, "sparse_adamw") for rate in (0.01, 0.05, 0.05)
    ]
    assert row_of(table, "sparse_adamw")[:4] == ["sparse_adamw", "2", "0.05", "2"]
    # Only the run whose line was cut off is made again.
    lines = runs.read_text().splitlines(keepends=True)
    assert [json.loads(line)["seed"] for line in lines] == [0, 0, 1] * 2
    runs.write_text("".join(lines[:-1]) + lines[-1][:20])
    assert steps.main(arguments) == 0
    assert capsys.readouterr().out == table
    assert len(of_steps) == 7
    assert steps.main([*arguments, "--show"]) == 0
    assert capsys.readouterr().out == table
    assert steps.main([*arguments, "--steps", "5", "--show"]) == 0
    assert capsys.readouterr().out.endswith("nothing\n")
    # A dense run is the same for every share; only the runs of `sparse_adamw` are new.
    assert steps.main([*arguments, "--share", "0.1"]) == 0
    assert of_steps[7:] == [f"sparse_adamw at {rate}" for rate in (0.01, 0.05, 0.05)]


def test_runs_over_links_are_kept_and_not_made_again(tmp_path, of_seconds, capsys):
    runs, figure = tmp_path / "runs", tmp_path / "figure.png"
    arguments = ["--runs", str(runs), "--rates", "0.002", "0.01", "--seeds", "2"]
    arguments += ["--link", "100mbit", "1gbit", "--seconds", "10", "--only", "dense"]
    arguments += ["--options", "gain=2"]
    assert time.main([*arguments, "--plot", str(figure)]) == 0
    expected = [(0.002, 0), (0.01, 0), (0.01, 1)]
    assert of_seconds == [
        (name, link, *run)
        for name in ("dense", "sparse_adamw gain=2")
        for link in ("100mbit", "1gbit")
        for run in expected
    ]
    table = capsys.readouterr().out
    assert "words, n = 1,000, P = 4, 1gbit, 10 s" in table
    # The mean goes from 3.5 after 5 s to 2.005 after 10 s: it is 3.005, dense's end, after 6.66 s.
    numbers = ["0.01", "2", "2.005", "0.007071", "-33.28", "6.656", "100", "100", "150", "0.5"]
    assert row_of(table, "sparse_adamw gain=2")[1:] == [*numbers, "100"]
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert time.main(arguments) == 0
    assert capsys.readouterr().out == table
    assert len(of_seconds) == 12


def test_neighbours_are_contestants_with_a_name_of_their_own(tmp_path, text, of_steps, capsys):
    runs, figure = tmp_path / "runs", tmp_path / "figure.png"
    arguments = [*SMALL, *text, "--runs", str(runs), "--only", DENSE, "--rates", "0.05"]
    arguments += ["--seeds", "2"]
    added = ["--options", "gain=2.0", "b2=0.999", "--plot", str(figure)]
    assert steps.main([*arguments, *added]) == 0
    name = "sparse_adamw b2=0.999 gain=2"
    assert of_steps == [f"{each} at 0.05" for each in (DENSE, name) for _ in range(2)]
    assert figure.read_bytes().startswith(b"\x89PNG")
    # Another order gives the same run, and `--show` also lists stored runs that are not named.
    assert steps.main([*arguments, "--options", "b2=0.999", "gain=2"]) == 0
    assert len(of_steps) == 4
    capsys.readouterr()
    assert steps.main([*arguments, "--show"]) == 0
    assert row_of(capsys.readouterr().out, name)[1:4] == ["2", "0.05", "2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n{}\n", "line 1 is no run of this program: no 'task'"),
        (b"x\n{}\n", "line 1 is no JSON"),
        (b"\xff\n", "cannot read"),
    ],
)
def test_another_file_is_one_line(tmp_path, content, message, capsys):
    path = tmp_path / "runs"
    path.write_bytes(content)
    assert message in refused(steps.main, ["--runs", str(path), "--show"], capsys)


def test_every_contestant_can_be_made():
    made = [make(0.1, 9).exchange for x in _tasks.KINDS for make in contestants(x, 0.5).values()]
    groups = _contestants.over_links().values()
    made += [make(lambda count: 0.1) for group in groups for make in group.values()]
    assert all(callable(tx.update) for tx in made)


# The clock of seconds.


def test_the_rate_comes_to_its_end_with_the_budget():
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


def test_a_round_is_as_slow_as_its_slowest_worker(monkeypatch, capsys, tmp_path):
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


def test_what_exchanges_nothing_computes_all_of_the_gradient():
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
def test_a_grid_has_the_losses_of_single_trainings(text, name):
    """Sums are in another order, so another entry may be the last one above a threshold."""
    tolerance = 1e-5 if name == DENSE else 3e-3
    task, make = _tasks.make("text", 8, Path(text[1]), None), contestants("text")[name]
    given = {"workers": 2, "steps": 6, "every": 3, "batch": 4, "label": name}
    found = train_grid(task, make, rates=[0.01, 0.05], seeds=[0, 2], **given)
    assert list(found) == [(0.01, 0), (0.01, 2), (0.05, 0), (0.05, 2)]
    for (rate, seed), curve in found.items():
        alone = train(task, make(rate, 6), seeds=[seed], **given)[0]
        assert curve.steps == alone.steps
        np.testing.assert_allclose(curve.values, alone.values, rtol=tolerance)
        np.testing.assert_allclose(curve.losses, alone.losses, rtol=tolerance)
        assert curve.words == alone.words
    assert len({curve.values[-1] for curve in found.values()}) == 4


def test_a_grid_is_stored_by_rate_and_seed(tmp_path, text, monkeypatch):
    """All pairs of a contestant are trained together, and only if one of them is missing."""
    calls = []

    def grid(task, make, *, rates, seeds, label, steps, **_):
        calls.append(label)
        value = {(rate, seed): 1 + rate + seed for rate in rates for seed in seeds}
        return {key: Curve([0, steps], [4.0, x], [x], 100.0, 0.1) for key, x in value.items()}

    monkeypatch.setattr(steps, "train_grid", grid)
    argv = [*SMALL, *text, "--together", "--rates", "0.1", "0.2", "--seeds", "2"]
    argv += ["--runs", str(tmp_path / "runs"), "--only", DENSE, "sparse_adamw"]
    steps.main(argv)
    steps.main(argv)
    assert calls == [DENSE, "sparse_adamw"]
    runs = [json.loads(line) for line in (tmp_path / "runs").read_text().splitlines()]
    assert [(run["rate"], run["seed"], run["value"]) for run in runs[:4]] == [
        (0.1, 0, 1.1),
        (0.1, 1, 2.1),
        (0.2, 0, 1.2),
        (0.2, 1, 2.2),
    ]
