"""The linear models of the examples: steps against NumPy, and nothing lost in an exchange."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_matrix, random_array
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from benchmarks._common.processes import coordinator, started
from examples.linear_models import __main__, coordinate_descent, data, sgd, training, workers
from tests import groups
from tests.sparse_collectives.helpers import slow_rows

pytestmark = pytest.mark.usefixtures("default_promotion")

# Neither features nor rows are a multiple of the workers.
SHAPE = data.Shape(size=301, nonzeros=8, rows=130, exponent=1.1)
RIDGE = 0.01


def problem():
    random = np.random.default_rng(0)
    matrix = random_array((60, 40), density=0.15, rng=random, dtype=np.float32, format="csr")
    labels = np.where(random.random(60) < 0.5, -1, 1).astype(np.float32)
    return csr_matrix(matrix), labels


def slope(name, margins, labels):
    products = margins * labels
    if name == "logistic":
        return -labels / (1 + np.exp(products))
    return -2 * labels * np.maximum(0, 1 - products)


def objective(matrix, labels, weights, name, ridge):
    products = labels * (matrix @ weights.astype(np.float64))
    logistic, svm = np.logaddexp(0, -products), np.maximum(0, 1 - products) ** 2
    losses = logistic if name == "logistic" else svm
    return losses.mean() + ridge / 2 * weights @ weights


# Gradient descent.


def trained(made, group, name, *, kind=sgd, epochs=2, model="logistic", **given):
    given = {"regularisation": RIDGE, "seed": 5} | (given or {"rate": 1.0})
    trainer = kind.Trainer(group, training.MODELS[model], made, name, **given)
    for _ in range(epochs):
        trainer.epoch()
    return trainer


@pytest.mark.parametrize("model", training.MODELS)
def test_sgd_with_one_batch_of_all_rows_is_gradient_descent(model):
    matrix, labels = problem()
    group = workers.on_devices(2)
    made = sgd.make(data.of_matrix("some", matrix, labels), group, 30)
    found = trained(made, group, "topk_a", epochs=4, model=model, rate=0.5)
    weights, objectives = np.zeros(40), []
    for step in range(5):
        objectives.append(objective(matrix, labels, weights, model, RIDGE))
        gradient = matrix.T @ slope(model, matrix @ weights, labels) / 60 + RIDGE * weights
        weights = weights - 0.5 / (1 + 0.5 * RIDGE * step) * gradient if step < 4 else weights
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.run.objectives, objectives, rtol=1e-5)


def test_sgd_counts_every_row_as_much_also_in_a_short_batch():
    """Steps that are too small for the order to matter add up to one step of the whole gradient."""
    matrix, labels = problem()
    group = workers.on_devices(2)
    made = sgd.make(data.of_matrix("some", matrix, labels), group, 14)
    assert made.counts == [28, 28, 4]
    found = trained(made, group, "dense", epochs=1, rate=1e-3)
    gradient = matrix.T @ slope("logistic", np.zeros(60), labels) / 60
    np.testing.assert_allclose(found.weights, -1e-3 * 60 / 28 * gradient, rtol=1e-2, atol=1e-8)


ALL = [name for name in training.EXCHANGES["sgd"] if name != "dense"]
MANY = SHAPE._replace(size=50_000, rows=400)


@pytest.mark.parametrize(
    ("count", "shape", "names"),
    [
        (3, SHAPE, ["ssar_recursive_double"]),
        *slow_rows(*((count, SHAPE, ALL) for count in (1, 2, 3, 4, 8))),
        *slow_rows((4, MANY, ["ssar_split_allgather", "dsar_split_allgather"])),
    ],
)
def test_exchanges_lose_nothing_and_what_finds_no_slot_is_an_error(count, shape, names):
    """With many features an exchange is sparse."""
    group = workers.on_devices(count)
    made = sgd.make(data.spread(data.power_law("some", shape, seed=0)), group, 20)
    assert shape != MANY or made.fit.selection < made.fit.union < 1000
    dense = trained(made, group, "dense")
    assert dense.run.objectives[-1] < 0.999 * dense.run.objectives[0]
    for name in names:
        found = trained(made, group, name)
        np.testing.assert_allclose(found.run.objectives, dense.run.objectives, rtol=1e-5)
        np.testing.assert_allclose(found.weights, dense.weights, rtol=1e-5, atol=1e-6)
        # Except for sums that are 0.
        assert found.run.delivered == pytest.approx(dense.run.delivered, abs=1)
    if count == 3:
        short = made._replace(fit=made.fit._replace(union=made.fit.union // 2))
        with pytest.raises(RuntimeError, match="ssar_recursive_double: an entry found no slot"):
            trained(short, group, "ssar_recursive_double", epochs=1)


# Coordinate descent.


@pytest.mark.parametrize("name", training.MODELS)
def test_steps_are_those_of_the_formula(name):
    matrix, labels = problem()
    weights = np.random.default_rng(1).standard_normal(40)
    margins, model = matrix @ weights, training.MODELS[name]
    made = coordinate_descent.make(data.of_matrix("some", matrix, labels))
    picked = np.array([3, 8, 9, 31, 40])
    dense = matrix.toarray()[:, picked[:4]].astype(np.float64)
    first = dense.T @ slope(name, margins, labels) / 60 + RIDGE * weights[picked[:4]]
    bound = {"logistic": 0.25, "svm": 2.0}[name] * (dense**2).sum(0) / 60
    slopes = np.asarray(model.slope(jnp.asarray(margins, jnp.float32), jnp.asarray(labels)))
    weights = np.append(weights, 0).astype(np.float32)
    found = coordinate_descent.steps(model.curvature, made, slopes, weights, picked, 3.0, RIDGE)
    np.testing.assert_allclose(found[:4], -first / (3 * bound + RIDGE), rtol=1e-4)
    assert float(found[4]) == 0


def test_coordinates_have_their_turn_once_with_their_owner():
    counts = np.random.default_rng(0).integers(0, 3, 103)
    owned = coordinate_descent.occurring(counts, 4)
    epoch = coordinate_descent.schedule(owned, 4, 103, 1, 0)
    assert epoch.shape == (6, 4, 4)
    assert (coordinate_descent.schedule(owned, 4, 103, 1, 1) != epoch).any()
    for worker in range(4):
        mine = np.sort(epoch[:, worker][epoch[:, worker] < 103])
        expected = np.flatnonzero(counts)
        np.testing.assert_array_equal(mine, expected[expected // 26 == worker])


@pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.slow), "dense_allgather"])
def test_coordinate_descent_descends_with_the_bits_of_a_dense_exchange(name):
    group, source = workers.on_devices(3), data.spread(data.power_law("some", SHAPE, seed=0))
    made, given = coordinate_descent.make(source), {"kind": coordinate_descent, "block": 10}
    sparse = trained(made, group, "sparse_allgather", epochs=3, **given)
    dense = trained(made, group, name, epochs=3, **given)
    assert (np.diff(sparse.run.objectives) < 0).all()
    assert sparse.run.objectives[-1] < 0.9 * sparse.run.objectives[0]
    matrix, labels = source.rows(0, source.count)
    expected = objective(matrix, labels, sparse.weights, "logistic", RIDGE)
    assert sparse.run.objectives[-1] == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(dense.weights, sparse.weights)
    per_step = {"dense": 2 * 301 * 2 / 3, "dense_allgather": 101 * 2}[name]
    assert dense.run.words[0] == pytest.approx(per_step * dense.run.steps)
    assert sparse.run.words[0] == 2 * 10 * 2 * sparse.run.steps


# The program. A dense exchange of each method and a sparse one:
SHORT = {"sgd": ["dense", "ssar_recursive_double"], "scd": ["dense_allgather", "sparse_allgather"]}


def written(folder, *argv):
    numbers = folder / "numbers.json"
    assert __main__.main([*argv, "--json", str(numbers)]) == 0
    return json.loads(numbers.read_text())


def solved(matrix, labels, model, ridge):
    """The objective that scikit-learn's solver finds."""
    matrix = matrix.astype(np.float64)
    # scikit-learn minimizes |w|^2 / 2 + C * sum(loss).
    given = {"C": 1 / (ridge * len(labels)), "fit_intercept": False, "tol": 1e-7}
    if model == "logistic":
        solver = LogisticRegression(**given, max_iter=10_000)
    else:
        solver = LinearSVC(**given, dual=False, max_iter=1_000_000)
    return objective(matrix, labels, solver.fit(matrix, labels).coef_[0], model, ridge)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", ["sgd logistic --rate 4", "scd logistic --block 3", "scd svm --block 3"]
)
def test_linear_models_reach_the_objective_of_a_solver(given, tmp_path):
    method, model, *more = given.split()
    file, shape = str(tmp_path / "rows"), data.Shape(size=120, nonzeros=14, rows=900, exponent=1.1)
    dump_svmlight_file(*data.power_law("some", shape, seed=1).rows(0, 900), file, zero_based=False)
    argv = ["--data", file, "--test", file, "--method", method, "--model", model, *more]
    argv += ["--epochs", "150", "--batch", "16", "--regularisation", "1e-3", "--exchange"]
    numbers = written(tmp_path, *argv, *SHORT[method])
    matrix, labels, _ = data.read(Path(file))
    expected = solved(matrix, labels, model, 1e-3)
    assert list(numbers["runs"]) == SHORT[method]
    assert 0.5 < numbers["test_accuracy"] <= 1
    for name, run in numbers["runs"].items():
        assert expected <= run["objectives"][-1] * (1 + 1e-5)
        assert run["objectives"][-1] < 1.01 * expected, name
        assert run["difference"] < 1e-5


def in_processes(count, argv):
    """The statuses and outputs of this number of joined processes."""
    program = [sys.executable, "-m", "examples.linear_models", *argv, "--workers", str(count)]
    with coordinator() as (address, bound):
        joined = [[*program, "--join", address, str(number)] for number in range(count)]
        with started(joined, bound) as processes:
            assert all(process.wait_for_end(groups.TIMEOUT) for process in processes)
    return [process.status for process in processes], [process.output for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize("method", list(SHORT))
def test_processes_compute_what_the_devices_of_one_do(method, tmp_path):
    argv = ["--method", method, "--rows", "800", "--epochs", "2", "--exchange", *SHORT[method]]
    here = written(tmp_path, *argv, "--workers", "3")
    statuses, said = in_processes(3, [*argv, "--json", str(tmp_path / "processes.json")])
    assert statuses == [0, 0, 0], said
    there = json.loads((tmp_path / "processes.json").read_text())
    for name, run in here["runs"].items():
        objectives = there["runs"][name]["objectives"]
        np.testing.assert_allclose(objectives, run["objectives"], rtol=1e-5)
        assert there["runs"][name]["words"] == run["words"]


@pytest.mark.slow
def test_processes_that_fail_end_with_the_status_and_one_line(tmp_path):
    file = tmp_path / "bad"
    file.write_text("1 1:1\n-1 x\n")
    statuses, said = in_processes(2, ["--data", str(file)])
    assert statuses == [2, 2], said
    lines = [x for each in said for x in each.splitlines() if x.startswith("linear_models")]
    assert lines == [f"linear_models: {file}, line 2: 'x' is not INDEX:VALUE"]
