"""The linear models of the examples: steps against NumPy, and that nothing is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_matrix, random_array

from examples.linear_models import coordinate_descent, data, sgd, training, workers
from sparse_collectives import PaddedCOO, _compat, simulate

pytestmark = pytest.mark.usefixtures("default_promotion")

# Neither features nor rows are a multiple of the workers.
SHAPE = data.Shape(size=301, nonzeros=8, rows=130, exponent=1.1)
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
    }[name]


def objective(matrix, labels, weights, name, regularisation):
    products = labels * (matrix @ weights.astype(np.float64))
    losses = {
        "logistic": np.logaddexp(0, -products),
        "svm": np.maximum(0, 1 - products) ** 2,
    }[name]
    return losses.mean() + regularisation / 2 * weights @ weights


# Gradients.


@pytest.mark.parametrize("name", training.MODELS)
def test_the_parts_of_the_workers_are_the_gradient(name):
    matrix, labels = problem()
    weights = np.random.default_rng(1).standard_normal(40)
    expected = matrix.T @ slope(name, matrix @ weights, labels) / 60
    packed = [sgd.pack(matrix[at : at + 20], labels[at : at + 20]) for at in (0, 20, 40)]
    state = sgd.Weights(jnp.asarray(weights / 2, jnp.float32), jnp.float32(2))
    total = np.zeros(40)
    for part, _ in packed:
        part = sgd.pad(part, 40, 40, 200, 25)
        coo = sgd.gradient(training.MODELS[name], state, jax.tree.map(jnp.asarray, part), 60.0)
        used = np.asarray(coo.indices)[np.asarray(coo.indices) < 40]
        assert (np.diff(used) > 0).all()
        total += np.asarray(coo.to_dense())
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", training.MODELS)
def test_losses_are_those_of_the_reference_and_padding_has_none(name):
    matrix, labels = problem()
    weights = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    model = training.MODELS[name]
    losses = model.loss(jnp.asarray(matrix @ weights), jnp.asarray(labels))
    expected = objective(matrix, labels, weights, name, 0.0)
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
    size, count = 10**6, 4
    matrix, labels = problem()
    part = sgd.pad(sgd.pack(matrix, labels)[0], size, 40, matrix.nnz, 60)
    fit = training.Fit(40, 20, 30, 100)
    made = training.EXCHANGES["sgd"]["ssar_recursive_double"](fit, count)

    def total(vector, scale, batch):
        weights = sgd.Weights(vector, scale)
        coo = sgd.gradient(training.MODELS["logistic"], weights, batch, 60.0)
        return made.reduce(coo, made.init(size, count), axis="workers")[0]

    state = jnp.zeros(size), jnp.ones(())
    mapped = simulate(total, axis_size=count, in_axes=(None, None, None))
    found = list(results_in(jax.make_jaxpr(mapped)(*state, part).jaxpr))
    assert len(found) > 50
    # A set of the indices has a bit for each feature, on each of four simulated workers.
    assert max(aval.size for _, aval in found) <= count * (size // 32 + 1)

    coo = PaddedCOO(jnp.zeros(100), jnp.full(100, size), size)
    step = jax.make_jaxpr(lambda w, t: sgd.update(w, t, jnp.float32(1), RIDGE))
    found = list(results_in(step(sgd.Weights(*state), coo).jaxpr))
    assert [name for name, aval in found if aval.size >= size] == ["scatter-add"]


# Gradient descent.


def trained(made, group, name, epochs=2, model="logistic", rate=1.0):
    given = {"rate": rate, "regularisation": RIDGE, "seed": 5}
    made = sgd.Trainer(group, training.MODELS[model], made, name, **given)
    for _ in range(epochs):
        made.epoch()
    return made


def test_one_batch_of_all_rows_is_gradient_descent():
    matrix, labels = problem()
    group = workers.on_devices(2)
    made = sgd.make(data.of_matrix("some", matrix, labels), group, 30)
    found = trained(made, group, "topk_a", epochs=4, model="svm", rate=0.5)
    weights, objectives = np.zeros(40), []
    for step in range(5):
        objectives.append(objective(matrix, labels, weights, "svm", RIDGE))
        gradient = matrix.T @ slope("svm", matrix @ weights, labels) / 60 + RIDGE * weights
        weights = weights - 0.5 / (1 + 0.5 * RIDGE * step) * gradient if step < 4 else weights
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.run.objectives, objectives, rtol=1e-5)


def test_every_row_counts_as_much_also_in_a_short_batch():
    """Steps too small for the order to matter add up to one step of the whole gradient."""
    matrix, labels = problem()
    group = workers.on_devices(2)
    made = sgd.make(data.of_matrix("some", matrix, labels), group, 14)
    assert made.counts == [28, 28, 4]
    found = trained(made, group, "dense", epochs=1, rate=1e-3)
    gradient = matrix.T @ slope("logistic", np.zeros(60), labels) / 60
    np.testing.assert_allclose(found.weights, -1e-3 * 60 / 28 * gradient, rtol=1e-2, atol=1e-8)


def made_for(count, rows=20):
    group = workers.on_devices(count)
    source = data.spread(data.power_law("some", SHAPE, seed=0))
    return group, sgd.make(source, group, rows), source


def test_messages_have_room_for_the_largest_batch_and_no_more():
    group, made, source = made_for(3)
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
    assert made.fit == training.Fit(max(selections), max(blocks), max(regions), max(unions))
    assert made.parts[0].indices.shape == (3 * made.fit.selection,)


def check_lossless(group, made, names):
    dense = trained(made, group, "dense")
    assert dense.run.objectives[-1] < 0.999 * dense.run.objectives[0]
    for name in names:
        found = trained(made, group, name)
        np.testing.assert_allclose(found.run.objectives, dense.run.objectives, rtol=1e-5)
        np.testing.assert_allclose(found.weights, dense.weights, rtol=1e-5, atol=1e-6)
        assert found.run.delivered == pytest.approx(
            dense.run.delivered, abs=1
        )  # but for sums that are 0


def test_recursive_doubling_loses_nothing_against_the_dense_allreduce():
    group, made, _ = made_for(3)
    check_lossless(group, made, ["ssar_recursive_double"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_no_exchange_loses_anything_against_the_dense_allreduce(count):
    group, made, _ = made_for(count)
    check_lossless(group, made, [name for name in training.EXCHANGES["sgd"] if name != "dense"])


@pytest.mark.slow
def test_the_split_allgather_is_sparse_and_lossless_with_many_features():
    group = workers.on_devices(4)
    shape = SHAPE._replace(size=50_000, rows=400)
    source = data.spread(data.power_law("some", shape, seed=0))
    made = sgd.make(source, group, 20)
    assert made.fit.selection < made.fit.union < 1000
    check_lossless(group, made, ["ssar_split_allgather", "dsar_split_allgather"])


def test_what_finds_no_slot_is_an_error_and_not_a_loss():
    group, made, _ = made_for(2)
    short = made._replace(fit=made.fit._replace(union=made.fit.union // 2))
    with pytest.raises(RuntimeError, match="ssar_recursive_double: an entry found no slot"):
        trained(short, group, "ssar_recursive_double", epochs=1)


# Coordinate descent.


@pytest.mark.parametrize("name", ["logistic", "svm"])
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


def test_a_step_of_a_quadratic_ends_in_its_minimum():
    """Within the hinge the squared one is (1 - y z)^2: ridge regression, in closed form."""
    column = np.random.default_rng(0).uniform(-0.5, 0.5, (9000, 1)).astype(np.float32)
    labels = np.sign(np.random.default_rng(1).standard_normal(9000)).astype(np.float32)
    ridge = 2 * (column[:, 0] @ labels) / (2 * (column**2).sum() + 9000 * RIDGE)
    made = coordinate_descent.make(data.of_matrix("some", csr_matrix(column), labels))
    zero, slopes = np.zeros(2, np.float32), -2 * labels
    found = coordinate_descent.steps(2.0, made, slopes, zero, np.zeros(1, int), 1.0, RIDGE)
    assert float(found[0]) == pytest.approx(float(ridge), rel=1e-4)


def test_one_at_a_time_needs_no_damping_and_all_at_once_that_of_the_longest_row():
    assert coordinate_descent.damping(14, block=1, owned=50, workers=1) == 1
    assert coordinate_descent.damping(14, block=50, owned=50, workers=4) == pytest.approx(14)
    some = coordinate_descent.damping(115, block=100, owned=800_000, workers=4)
    assert 1 < some < 1.05


def test_each_coordinate_has_its_turn_once_with_its_owner():
    counts = np.random.default_rng(0).integers(0, 3, 103)
    owned = coordinate_descent.occurring(counts, 4)
    epoch = coordinate_descent.schedule(owned, 4, 103, 1, 0)
    assert epoch.shape == (6, 4, 4)
    assert (np.diff(epoch) >= 0).all()
    assert (coordinate_descent.schedule(owned, 4, 103, 1, 1) != epoch).any()
    for worker in range(4):
        mine = np.sort(epoch[:, worker][epoch[:, worker] < 103])
        expected = np.flatnonzero(counts)
        np.testing.assert_array_equal(mine, expected[expected // 26 == worker])


def descended(group, made, name, epochs=3):
    given = {"block": 10, "regularisation": RIDGE, "seed": 2}
    made = coordinate_descent.Trainer(group, training.MODELS["logistic"], made, name, **given)
    for _ in range(epochs):
        made.epoch()
    return made


@pytest.fixture(scope="module")
def gathered():
    group = workers.on_devices(3)
    source = data.spread(data.power_law("some", SHAPE, seed=0))
    made = coordinate_descent.make(source)
    return group, source, descended(group, made, "sparse_allgather"), made


def test_coordinate_descent_descends_and_follows_the_margins(gathered):
    _, source, found, _ = gathered
    assert (np.diff(found.run.objectives) < 0).all()
    assert found.run.objectives[-1] < 0.9 * found.run.objectives[0]
    matrix, labels = source.rows(0, source.count)
    np.testing.assert_allclose(found.margins, matrix @ found.weights, atol=1e-5)
    expected = objective(matrix, labels, found.weights, "logistic", RIDGE)
    assert found.run.objectives[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.slow), "dense_allgather"])
def test_the_dense_exchanges_of_coordinates_give_the_same_bits(name, gathered):
    group, _, sparse, made = gathered
    found = descended(group, made, name)
    np.testing.assert_array_equal(found.weights, sparse.weights)
    per_step = {"dense": 2 * 301 * 2 / 3, "dense_allgather": 101 * 2}[name]
    assert found.run.words[0] == pytest.approx(per_step * found.run.steps)
    assert sparse.run.words[0] == 2 * 10 * 2 * sparse.run.steps
