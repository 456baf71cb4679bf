"""The linear models of the examples: reading, steps against NumPy, and that nothing is lost."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy.sparse import csr_matrix, random_array
from sklearn.datasets import dump_svmlight_file

from examples._data import InputError
from examples.linear_models import (
    __main__,
    batches,
    coordinate_descent,
    data,
    exchange,
    generate,
    group,
    launch,
    models,
    reference,
    sgd,
    sharded,
)
from examples.linear_models import columns as by_column
from sparse_collectives import PaddedCOO, _compat, simulate

pytestmark = pytest.mark.usefixtures("default_promotion")

# Neither features nor rows are a multiple of the workers.
SHAPE = generate.Shape(size=301, nonzeros=8, rows=130, exponent=1.1)
RIDGE = 0.01


def problem(seed=0, rows=60, size=40):
    random = np.random.default_rng(seed)
    matrix = random_array((rows, size), density=0.15, rng=random, dtype=np.float32, format="csr")
    labels = np.where(random.random(rows) < 0.5, -1, 1).astype(np.float32)
    return csr_matrix(matrix), labels


def slope(name, margins, labels):
    products = margins * labels
    return {
        "logistic": -labels / (1 + np.exp(products)),
        "svm": -2 * labels * np.maximum(0, 1 - products),
        "hinge": -labels * (products < 1),
    }[name]


# Data.


def test_what_is_written_is_read(tmp_path):
    matrix, labels = problem()
    for path in (tmp_path / "data", tmp_path / "data.gz"):
        opened = gzip.open if path.suffix else open
        with opened(path, "wb") as file:
            dump_svmlight_file(matrix, np.where(labels > 0, 7, 3), file, zero_based=False)
        read, found, classes = data.read(path, size=50)
        assert classes == (3, 7)
        assert read.shape == (60, 50)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(found, labels)
        np.testing.assert_allclose(read.toarray()[:, :40], matrix.toarray(), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:2\nx 2:3", "line 2: the label 'x' is not a finite number"),
        ("1 1:2\n-1 2:3 4", "line 2: '4' is not INDEX:VALUE"),
        ("1 1:2\n-1 a:3", "line 2: 'a:3' is not INDEX:VALUE"),
        ("1 1:2\n# none\n-1 2:y", "line 3: the value of '2:y' is not a finite number"),
        ("1 1:2\n-1 2:nan", "line 2: the value of '2:nan' is not a finite number"),
        ("1 1:2\n-1 2:1e39", "line 2: the value of '2:1e39' is not a finite number"),
        ("inf 1:2\n-1 2:1", "line 1: the label 'inf' is not a finite number"),
        ("1 0:2\n-1 2:3", "line 1: the index of '0:2' is below 1"),
        ("1 -4:2\n-1 2:3", "line 1: the index of '-4:2' is below 1"),
        ("1 1:2\n-1 3:1 2:1", "line 2: the index of '2:1' is not above the one before it, 3"),
        ("1 1:2\n-1 3:1 3:1", "line 2: the index of '3:1' is not above the one before it, 3"),
        ("1 1:2\n-1 6:1", "line 2: the index of '6:1' is above the size, 5"),
        ("1 1:2\n-1 99999999999:1", "line 2: the index of '99999999999:1' is above the size, 5"),
        ("1 1:2\n1 2:2", "has 1 labels (1): a linear classifier takes two"),
        ("1 1:2\n2 2:2\n3 1:1", "has 3 labels (1, 2, 3): a linear classifier takes two"),
        ("1 1:2\n0 2:2", "has the labels 0, 1, expected -1, 1"),
        ("", "has no rows"),
    ],
)
def test_a_malformed_file_is_one_line_that_names_the_place(text, message, tmp_path):
    path = tmp_path / "bad"
    path.write_text(text + "\n")
    with pytest.raises(InputError) as raised:
        data.read(path, 5, (-1.0, 1.0))
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot read .*none: No such file"):
        data.read(tmp_path / "none")


@pytest.mark.parametrize("size", [1, 2, 5, 123, 3600, 3_231_961])
def test_features_are_renumbered_one_to_one_and_runs_come_apart(size):
    moved = data.spread_indices(np.arange(size), size)
    assert moved.dtype == np.int32
    np.testing.assert_array_equal(np.sort(moved), np.arange(size))
    if size > 1000:
        shares = np.histogram(moved[: size // 10], bins=4, range=(0, size))[0] / (size // 10)
        np.testing.assert_allclose(shares, 0.25, atol=0.05)


def test_generated_rows_do_not_depend_on_who_asks():
    shape = SHAPE._replace(rows=600)
    source = generate.power_law("some", shape, seed=3)
    matrix, labels = source.rows(0, 600)
    part, part_labels = source.rows(240, 510)
    np.testing.assert_array_equal(part.toarray(), matrix.toarray()[240:510])
    np.testing.assert_array_equal(part_labels, labels[240:510])
    np.testing.assert_allclose(np.sqrt(matrix.multiply(matrix).sum(1)), 1, rtol=1e-5)
    other = generate.power_law("some", shape, seed=4).rows(0, 600)[0]
    assert (other != matrix).nnz > 0
    popularity = matrix.getnnz(axis=0)
    assert popularity[0] > 5 * popularity[100:].mean() > 0
    assert 4 < matrix.nnz / 600 < 8
    assert set(labels) == {-1, 1}


# Gradients.


@pytest.mark.parametrize("name", models.MODELS)
def test_the_parts_of_the_workers_are_the_gradient(name):
    matrix, labels = problem()
    weights = np.random.default_rng(1).standard_normal(40)
    expected = matrix.T @ slope(name, matrix @ weights, labels) / 60
    packed = [batches._pack(matrix[at : at + 20], labels[at : at + 20], 25) for at in (0, 20, 40)]
    state = sgd.Weights(jnp.asarray(weights / 2, jnp.float32), jnp.float32(2))
    total = np.zeros(40)
    for part, _ in packed:
        part = batches._padded(part, 40, 40, 200)
        coo = sgd.gradient(models.MODELS[name](), state, jax.tree.map(jnp.asarray, part), 60.0)
        used = np.asarray(coo.indices)[np.asarray(coo.indices) < 40]
        assert (np.diff(used) > 0).all()
        total += np.asarray(coo.to_dense())
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", models.MODELS)
def test_losses_are_those_of_the_reference_and_padding_has_none(name):
    matrix, labels = problem()
    weights = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    model = models.MODELS[name]()
    losses = model.loss(jnp.asarray(matrix @ weights), jnp.asarray(labels))
    expected = reference.objective(matrix, labels, weights, name, 0.0)
    assert float(jnp.mean(losses)) == pytest.approx(expected, rel=1e-5)
    nothing = jnp.zeros(1)
    assert float(model.loss(nothing, nothing)[0]) == 0
    assert float(model.slope(nothing, nothing)[0]) == 0


def results_in(jaxpr):
    for equation in jaxpr.eqns:
        for inner in _compat.jaxprs_in(equation):
            yield from results_in(_compat.open_jaxpr(inner)[0])
        yield from ((equation.primitive.name, x.aval) for x in equation.outvars)


def test_no_vector_of_all_features_is_made_on_the_way():
    """From the data to the total; the update writes into the weights, and makes nothing else."""
    size, workers = 10**6, 4
    matrix, labels = problem()
    part = batches._padded(batches._pack(matrix, labels, 60)[0], size, 40, matrix.nnz)
    made = exchange.recursive_double(batches.Fit(40, 20, 30, 100), workers)

    def total(vector, scale, batch):
        weights = sgd.Weights(vector, scale)
        coo = sgd.gradient(models.logistic(), weights, batch, 60.0)
        return made.reduce(coo, made.init(size, workers), axis="workers")[0]

    state = jnp.zeros(size), jnp.ones(())
    mapped = simulate(total, axis_size=workers, in_axes=(None, None, None))
    found = list(results_in(jax.make_jaxpr(mapped)(*state, part).jaxpr))
    assert len(found) > 50
    # A set of the indices has a bit for each feature, on each of four simulated workers.
    assert max(aval.size for _, aval in found) <= workers * (size // 32 + 1)

    coo = PaddedCOO(jnp.zeros(100), jnp.full(100, size), size)
    step = jax.make_jaxpr(lambda w, t: sgd.update(w, t, jnp.float32(1), RIDGE))
    found = list(results_in(step(sgd.Weights(*state), coo).jaxpr))
    assert [name for name, aval in found if aval.size >= size] == ["scatter-add"]


# Gradient descent.


def trained(made, workers, name, epochs=2, model="logistic", rate=1.0):
    training = sgd.Trainer(
        workers, models.MODELS[model](), made, name, sgd.Settings(rate, RIDGE, seed=5)
    )
    for _ in range(epochs):
        training.epoch()
    return training.finished()


def test_one_batch_of_all_rows_is_gradient_descent():
    matrix, labels = problem()
    workers = group.on_devices(2)
    made = batches.make(data.of_matrix("some", matrix, labels), workers, 30)
    found = trained(made, workers, "topk_a", epochs=4, model="svm", rate=0.5)
    weights, objectives = np.zeros(40), []
    for step in range(5):
        objectives.append(reference.objective(matrix, labels, weights, "svm", RIDGE))
        gradient = matrix.T @ slope("svm", matrix @ weights, labels) / 60 + RIDGE * weights
        weights = weights - 0.5 / (1 + 0.5 * RIDGE * step) * gradient if step < 4 else weights
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.objectives, objectives, rtol=1e-5)


def made_for(count, rows=20):
    workers = group.on_devices(count)
    source = data.spread(generate.power_law("some", SHAPE, seed=0))
    return workers, batches.make(source, workers, rows), source


def test_messages_have_room_for_the_largest_batch_and_no_more():
    workers, made, source = made_for(3)
    assert made.counts == [60, 60, 10]
    blocks, regions, unions, selections = [], [], [], []
    for start in range(0, 130, 60):
        sets = []
        for worker in range(3):
            low = min(start + 20 * worker, 130)
            sets.append(set(source.rows(low, min(low + 20, 130))[0].indices) if low < 130 else [])
        union = set().union(*sets)
        selections += map(len, sets)
        blocks += [sum(i // 101 == r for i in one) for one in sets for r in range(3)]
        regions += [sum(i // 101 == r for i in union) for r in range(3)]
        unions.append(len(union))
    assert made.fit == batches.Fit(max(selections), max(blocks), max(regions), max(unions))
    assert made.parts[0].indices.shape == (3, made.fit.selection)


def check_lossless(workers, made, names):
    dense = trained(made, workers, "dense")
    assert dense.objectives[-1] < 0.999 * dense.objectives[0]
    for name in names:
        found = trained(made, workers, name)
        np.testing.assert_allclose(found.objectives, dense.objectives, rtol=1e-5)
        np.testing.assert_allclose(found.weights, dense.weights, rtol=1e-5, atol=1e-6)
        assert found.delivered == pytest.approx(dense.delivered, abs=1)  # but for sums that are 0


def test_recursive_doubling_loses_nothing_against_the_dense_allreduce():
    workers, made, _ = made_for(3)
    check_lossless(workers, made, ["ssar_recursive_double"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_no_exchange_loses_anything_against_the_dense_allreduce(count):
    workers, made, _ = made_for(count)
    check_lossless(workers, made, [name for name in exchange.GRADIENTS if name != "dense"])


@pytest.mark.slow
def test_the_split_allgather_is_sparse_and_lossless_with_many_features():
    workers = group.on_devices(4)
    shape = SHAPE._replace(size=50_000, rows=400)
    source = data.spread(generate.power_law("some", shape, seed=0))
    made = batches.make(source, workers, 20)
    assert made.fit.selection < made.fit.union < 1000
    check_lossless(workers, made, ["ssar_split_allgather", "dsar_split_allgather"])


def test_what_finds_no_slot_is_an_error_and_not_a_loss():
    workers, made, _ = made_for(2)
    short = made._replace(fit=made.fit._replace(union=made.fit.union // 2))
    with pytest.raises(RuntimeError, match="ssar_recursive_double: an entry found no slot"):
        trained(short, workers, "ssar_recursive_double", epochs=1)


# Coordinate descent.


@pytest.mark.parametrize("name", ["logistic", "svm"])
def test_steps_are_those_of_the_formula(name):
    matrix, labels = problem()
    weights = np.random.default_rng(1).standard_normal(40)
    margins, model = matrix @ weights, models.MODELS[name]()
    picked = np.array([3, 8, 9, 31, 40])
    dense = matrix.toarray()[:, picked[:4]].astype(np.float64)
    first = dense.T @ slope(name, margins, labels) / 60 + RIDGE * weights[picked[:4]]
    bound = {"logistic": 0.25, "svm": 2.0}[name] * (dense**2).sum(0) / 60
    found = coordinate_descent.steps(
        model,
        jax.tree.map(jnp.asarray, by_column.of_matrix(matrix)),
        jnp.asarray(labels),
        jnp.asarray(margins, jnp.float32),
        jnp.asarray(np.append(weights, 0)[picked], jnp.float32),
        jnp.asarray(picked, jnp.int32),
        damping=3.0,
        regularisation=RIDGE,
    )
    np.testing.assert_allclose(found[:4], -first / (3 * bound + RIDGE), rtol=1e-4)
    assert float(found[4]) == 0


def test_a_step_of_a_quadratic_ends_in_its_minimum():
    """Within the hinge the squared one is (1 - y z)^2: ridge regression, in closed form."""
    column = np.random.default_rng(0).uniform(-0.5, 0.5, (9000, 1)).astype(np.float32)
    labels = np.sign(np.random.default_rng(1).standard_normal(9000)).astype(np.float32)
    ridge = 2 * (column[:, 0] @ labels) / (2 * (column**2).sum() + 9000 * RIDGE)
    found = coordinate_descent.steps(
        models.svm(),
        jax.tree.map(jnp.asarray, by_column.of_matrix(csr_matrix(column))),
        jnp.asarray(labels),
        jnp.zeros(9000),
        jnp.zeros(1),
        jnp.zeros(1, jnp.int32),
        damping=1.0,
        regularisation=RIDGE,
    )
    assert float(found[0]) == pytest.approx(float(ridge), rel=1e-4)


def test_one_at_a_time_needs_no_damping_and_all_at_once_that_of_the_longest_row():
    assert coordinate_descent.damping(14, block=1, owned=50, workers=1) == 1
    assert coordinate_descent.damping(14, block=50, owned=50, workers=4) == pytest.approx(14)
    some = coordinate_descent.damping(115, block=100, owned=800_000, workers=4)
    assert 1 < some < 1.05


def test_each_coordinate_has_its_turn_once_with_its_owner():
    counts = np.random.default_rng(0).integers(0, 3, 103)
    owned = coordinate_descent.occurring(counts, 4)
    plan = coordinate_descent.Schedule(owned, length=7, size=103, block=4, seed=1)
    epoch = plan.epoch(0)
    assert epoch.shape == (7, 4, 4)
    assert (np.diff(epoch) >= 0).all()
    assert (plan.epoch(1) != epoch).any()
    for worker in range(4):
        mine = np.sort(epoch[:, worker][epoch[:, worker] < 103])
        expected = np.flatnonzero(counts)
        np.testing.assert_array_equal(mine, expected[expected // 26 == worker])


def descended(module, workers, made, name, epochs=3, model="logistic"):
    settings = coordinate_descent.Settings(10, RIDGE, seed=2)
    training = module.Trainer(workers, models.MODELS[model](), made, name, settings)
    for _ in range(epochs):
        training.epoch()
    return training


@pytest.fixture(scope="module")
def gathered():
    workers = group.on_devices(3)
    source = data.spread(generate.power_law("some", SHAPE, seed=0))
    made = coordinate_descent.problem_of(source, workers)
    return workers, source, descended(coordinate_descent, workers, made, "sparse_allgather"), made


def test_coordinate_descent_descends_and_follows_the_margins(gathered):
    _, source, training, _ = gathered
    found = training.finished()
    assert (np.diff(found.objectives) < 0).all()
    assert found.objectives[-1] < 0.9 * found.objectives[0]
    matrix, labels = source.rows(0, source.count)
    margins = np.asarray(training._state.margins)
    np.testing.assert_allclose(margins, matrix @ found.weights, atol=1e-5)
    expected = reference.objective(matrix, labels, found.weights, "logistic", RIDGE)
    assert found.objectives[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["dense", "dense_allgather"])
def test_the_dense_exchanges_of_coordinates_give_the_same_bits(name, gathered):
    workers, _, training, made = gathered
    sparse = training.finished()
    found = descended(coordinate_descent, workers, made, name).finished()
    np.testing.assert_array_equal(found.weights, sparse.weights)
    per_step = {"dense": 2 * 301 * 2 / 3, "dense_allgather": 101 * 2}[name]
    assert found.words[0] == pytest.approx(per_step * found.steps)
    assert sparse.words[0] == 2 * 10 * 2 * sparse.steps


@pytest.mark.parametrize("name", ["dense", "ssar_recursive_double"])
def test_sharded_features_give_what_replicated_ones_do(name, gathered):
    workers, source, training, _ = gathered
    made = sharded.problem_of(source, workers)
    found = descended(sharded, workers, made, name).finished()
    expected = training.finished()
    np.testing.assert_allclose(found.objectives, expected.objectives, rtol=1e-5)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-4, atol=1e-5)


# The command line.


def written(folder, *argv):
    out, numbers = folder / "out.png", folder / "numbers.json"
    assert __main__.main([*argv, "--out", str(out), "--json", str(numbers)]) == 0
    with Image.open(out) as image:
        assert image.width > 600
        assert len(np.unique(np.asarray(image.convert("L")))) > 20
    return json.loads(numbers.read_text())


def libsvm_file(path, rows=900):
    shape = generate.Shape(size=120, nonzeros=14, rows=rows, exponent=1.1)
    matrix, labels = generate.power_law("some", shape, seed=1).rows(0, rows)
    dump_svmlight_file(matrix, labels, str(path), zero_based=False)
    return str(path)


def test_the_program_compares_exchanges_on_a_file(tmp_path, capsys):
    file = libsvm_file(tmp_path / "rows", 300)
    argv = ["--data", file, "--test", file, "--workers", "2", "--epochs", "2", "--solver"]
    numbers = written(tmp_path, *argv, "--exchange", "dense", "topk_a")
    assert list(numbers["runs"]) == ["dense", "topk_a"]
    assert numbers["runs"]["dense"]["words"] == [120 * 2] * 2  # two steps of 2 n / 2
    assert numbers["runs"]["topk_a"]["difference"] < 1e-5
    assert numbers["solver"] < min(numbers["runs"]["dense"]["objectives"])
    assert 0.5 < numbers["test_accuracy"] <= 1
    printed = capsys.readouterr().out
    assert "300 rows, 120 features; logistic, sgd, 2 workers" in printed
    assert "scikit-learn" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "0"], "0 is not between 1 and"),
        (["--exchange", "ring"], "--exchange ring is none of --method sgd"),
        (["--method", "scd", "--exchange", "topk_a"], "is none of --method scd"),
        (["--method", "scd", "--model", "hinge"], "has no second derivative"),
        (["--features", "sharded"], "--features sharded is for --method scd"),
        (["--rate", "1e5", "--regularisation", "1"], "must be below 1"),
        (["--test", "file"], "--test and --size are for --data"),
        (["--data", "none", "--rows", "5"], "--rows is for generated data"),
        (["--data", "no-such-file"], "cannot read no-such-file: No such file"),
        (["--mpi", "--processes"], "exclude one another"),
        (["--mpi", "--workers", "2"], "it is the -n of mpirun"),
        (["--coordinator", "host:1"], "--coordinator and --process-id go together"),
        (["--coordinator", "host", "--process-id", "0"], "expected HOST:PORT"),
        (["--coordinator", "host:1", "--process-id", "4"], "--process-id is 4, of 4 workers"),
        (["--workers", "9"], "--workers is 9, but jax runs with 8 devices"),
        (["--out", "figure.txt"], "must end in one of"),
        (["--json", "no/such/folder/file"], "cannot write"),
    ],
)
def test_wrong_input_is_one_line(argv, message, capsys):
    try:
        status = __main__.main(argv)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "more"),
    [
        ("sgd", "logistic", ["--rate", "4"]),
        ("sgd", "svm", []),
        ("sgd", "hinge", ["--rate", "20", "--epochs", "60"]),
        ("scd", "logistic", ["--block", "3"]),
        ("scd", "svm", ["--block", "3"]),
    ],
)
def test_it_reaches_the_objective_of_a_solver(method, model, more, tmp_path):
    argv = ["--data", libsvm_file(tmp_path / "rows"), "--method", method, "--model", model]
    argv += ["--epochs", "150", "--batch", "16", "--regularisation", "1e-3", "--solver", *more]
    numbers = written(tmp_path, *argv)
    for name, run in numbers["runs"].items():
        assert numbers["solver"] <= run["objectives"][-1] * (1 + 1e-5)
        assert run["objectives"][-1] < 1.01 * numbers["solver"], name
        assert run["difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv", [[], ["--method", "scd"], ["--method", "scd", "--features", "sharded"]]
)
def test_processes_compute_what_the_devices_of_one_do(argv, tmp_path):
    argv = [*argv, "--rows", "800", "--workers", "3", "--epochs", "2"]
    here = written(tmp_path, *argv)
    there = written(tmp_path, *argv, "--processes")
    for name, run in here["runs"].items():
        objectives = there["runs"][name]["objectives"]
        np.testing.assert_allclose(objectives, run["objectives"], rtol=1e-5)
        assert there["runs"][name]["words"] == run["words"]


@pytest.mark.slow
def test_processes_that_fail_end_with_the_status_and_one_line(tmp_path, capfd):
    file = tmp_path / "bad"
    file.write_text("1 1:1\n-1 x\n")
    assert launch.on_loopback(["--data", str(file), "--workers", "2"], 2) == 2
    lines = [x for x in capfd.readouterr().err.splitlines() if "linear_models" in x]
    assert lines == [f"linear_models: {file}, line 2: 'x' is not INDEX:VALUE"]
