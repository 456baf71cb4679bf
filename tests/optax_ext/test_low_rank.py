"""PowerSGD and ACP-SGD: against NumPy, their words and states, and values that are too large.

test_contract.py checks that nothing is lost, all agree, a skipped step changes nothing and a step
lowers for GPUs; tests/fuzz does so with any policy, decay, precision of the residual and wrapper.
test_checkpoint.py and test_reshard.py restore a state to the bit and move it to other workers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._low_rank import _factors, _matrices
from sparse_collectives import traffic
from tests.optax_ext.helpers import flat, mesh, normal, refused, run, same, slow, train
from tests.reference import low_rank as reference

WORKERS, STEPS, RANK = 3, 6, 2
PARAMS = {
    "bias": jnp.zeros(7),
    "conv": jnp.zeros((3, 2, 4, 14)),  # 24 x 14
    "half": jnp.zeros((20, 5), jnp.bfloat16),
    "small": jnp.zeros((2, 3)),  # Two factors would be larger.
    "w": jnp.zeros((18, 16)),
}
# In the order of the buffer.
MATRICES = {"conv": (24, 14), "half": (20, 5), "w": (18, 16)}
SIZE, DENSE = 24 * 14 + 20 * 5 + 18 * 16, 13
METHODS = {"powersgd": optax_ext.powersgd, "acp_sgd": optax_ext.acp_sgd}
both = pytest.mark.parametrize("method", METHODS)
one_slow = pytest.mark.parametrize("method", ["acp_sgd", slow("powersgd")])


@functools.cache
def gradients():
    rng = np.random.default_rng(1)
    return {
        name: np.asarray(
            rng.standard_normal(leaf.shape) + rng.standard_normal((STEPS, WORKERS, *leaf.shape)),
            np.dtype(leaf.dtype),
        )
        for name, leaf in PARAMS.items()
    }


def changed(name, at, value):
    """The gradients with something else in one of them; a copy."""
    given = {key: leaf.copy() for key, leaf in gradients().items()}
    given[name][at] = value
    return given


def steps_of(method, given=None, **options):
    tx = METHODS[method](RANK, axis="w", **options)
    found = run(tx, gradients() if given is None else given)
    return found.start, found


def matrices(flat):
    """The matrices ``f64[..., rows, cols]`` in the buffers ``[..., n]``."""
    found, start = {}, 0
    for name, (rows, cols) in MATRICES.items():
        part = np.asarray(flat, np.float64)[..., start : start + rows * cols]
        found[name], start = part.reshape(*part.shape[:-1], rows, cols), start + rows * cols
    assert start == flat.shape[-1]
    return found


def accumulated(found, given):
    """``f64[steps, W, n]``: each worker's accumulator before the exchange."""
    kept = found.residuals.astype(np.float64)
    new = flat({name: given[name] for name in MATRICES}, (STEPS, WORKERS))
    return np.concatenate([np.zeros_like(kept[:1]), kept[:-1]]) + new


ROWS, COLS = 24 + 20 + 18, 14 + 5 + 16


def step_words(method, rows):
    """The words of one step, without the factor (P - 1) / P."""
    if method == "powersgd":
        return 2 * (RANK * (ROWS + COLS) + DENSE)
    return 2 * (RANK * (ROWS if rows else COLS) + DENSE)


@one_slow
def test_low_rank_step_is_what_the_paper_says(method):
    start, found = steps_of(method)
    acc = accumulated(found, gradients())
    left, right = start.allreduce if method == "acp_sgd" else (None, start.allreduce.right)
    at = [0, 0]
    for name, (rows, cols) in MATRICES.items():
        q = np.asarray(right[0, 0, at[1] :][: RANK * cols], np.float64).reshape(RANK, cols).T
        p = None if left is None else np.asarray(left[0, 0, at[0] :][: RANK * rows], np.float64)
        p = None if p is None else p.reshape(rows, RANK)
        at = [at[0] + RANK * rows, at[1] + RANK * cols]
        for step in range(STEPS):
            mine = matrices(acc)[name][step]
            if method == "powersgd":
                expected, kept, q = reference.powersgd(mine, q)
            else:
                expected, kept, p, q = reference.acp_sgd(mine, p, q, step)
            # bfloat16 rounds the update, and that goes back into the residuals.
            rounding = 2e-2 if name == "half" else 1e-3
            got = found.updates[name][step, 0].astype(np.float64).reshape(rows, cols)
            np.testing.assert_allclose(got, expected, atol=rounding)
            residual = matrices(found.residuals[step])[name]
            np.testing.assert_allclose(residual, kept, atol=rounding)
    # The others are exchanged densely.
    assert start.layout.dense == (True, False, False, True, False)
    for name in ("bias", "small"):
        expected = gradients()[name].mean(1)
        np.testing.assert_allclose(found.updates[name][:, 0], expected, rtol=1e-5, atol=1e-6)
    words = [step_words(method, rows=step % 2 == 0) * 2 / 3 for step in range(STEPS)]
    np.testing.assert_allclose(found.state.info.words[:, 0], words, rtol=1e-6)


@both
def test_zeros_are_no_nan_and_no_dead_end(method):
    """Two steps without a gradient, one of a single entry, and then as before."""
    given = {name: leaf.copy() for name, leaf in gradients().items()}
    for leaf in given.values():
        leaf[:3] = 0
    given["w"][2, 0, 4, 3] = 1.0
    _, found = steps_of(method, given)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.states))
    assert not any(np.asarray(leaf[:2], np.float32).any() for leaf in found.updates.values())
    # Both columns of the factors are in use again.
    assert np.linalg.matrix_rank(found.updates["w"][-1, 0], tol=1e-2) == RANK


@both
def test_low_rank_sum_that_is_too_large_stays_with_the_workers(method):
    given = changed("w", (1, 2, 0, 0), 3e38)
    _, found = steps_of(method, given)
    assert found.state.withheld[:, 0].tolist() == [18 * 16 * step for step in range(STEPS)]
    assert not found.updates["w"][1:].any()
    assert (found.updates["conv"][1:] != 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.states))
    acc = matrices(accumulated(found, given))["w"].astype(np.float32)
    np.testing.assert_array_equal(matrices(found.residuals)["w"][1:], acc[1:])


@pytest.mark.slow
@both
def test_propagate_passes_it_on(method):
    _, found = steps_of(method, changed("w", (1, 2, 0, 0), np.inf), nonfinite="propagate")
    assert np.isnan(found.updates["w"][1]).any()
    assert np.isfinite(found.updates["conv"]).all()


@one_slow
def test_dense_steps_leave_residuals_and_factors_alone(method):
    start, found = steps_of(method, dense_steps=2)
    kept = matrices(found.residuals[:2])
    assert not kept["conv"].any()
    assert not kept["w"].any()
    # A leaf of 16 bits leaves its rounding error.
    assert 0 < np.abs(kept["half"]).max() <= 2.0**-7
    same(jax.tree.map(lambda x: x[1], found.state.allreduce), start.allreduce)
    expected = gradients()["w"].mean(1)[:2]
    np.testing.assert_allclose(found.updates["w"][:2, 0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.state.info.words[0, 0], 2 * (SIZE + DENSE) * 2 / 3)


@both
@pytest.mark.parametrize("workers", [1, 2, 5, 8, 1024])
def test_words_and_messages_are_those_of_the_program(method, workers):
    tx = METHODS[method](RANK, axis="w", nonfinite="propagate")
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, {"w": 1}), PARAMS)
    # As each of them sees its own.
    state = state._replace(settings=dataclasses.replace(state.settings, workers=workers))
    measured = traffic.of_function(tx.update, PARAMS, state, axis="w", axis_size=workers)
    share = (workers - 1) / workers
    mean = (step_words(method, True) + step_words(method, False)) / 2 * share
    assert measured.words == pytest.approx(mean)
    # Two for PowerSGD; one for ACP-SGD, in either branch.
    assert len(measured.collectives) == 2
    assert sum(row.weight for row in measured.collectives) == (2 if method == "powersgd" else 1)


LAYER = {"b": np.zeros(12, np.float32), "w": np.zeros((16, 12), np.float32)}


def loss_fn(params, x):
    y = x @ normal((16, 12), 100) + 1 + np.float32(0.1) * jnp.roll(x[:, :12], 1, axis=1)
    return 0.5 * jnp.mean(jnp.sum((x @ params["w"] + params["b"][None] - y) ** 2, axis=1))


@pytest.mark.slow
@both
def test_low_rank_trains_a_step_ahead_in_a_checked_step(method):
    """SGD whose residual is an update of the parameters."""
    rate, ahead = optax.scale_by_learning_rate(0.1), optax_ext.residual(step_ahead=1.0)
    tx = METHODS[method](2, axis="data", local=rate, residual=ahead)
    batches = [normal((32, 16), seed) for seed in range(40)]
    results = train(tx, loss_fn, LAYER, batches, mesh())
    assert float(results[1][2]) > 80
    assert float(results[-1][2]) < 1
    values = optax_ext.metrics(results[-1][1])
    assert float(values["delivered_density"]) == float(values["occupancy"]) == 1
    assert float(values["effective_density"]) < 2 * 28 / (16 * 12) + 1e-6


@pytest.mark.parametrize(
    ("shape", "rows", "cols"),
    [((5, 7), 5, 7), ((1, 1, 64, 256), 64, 256), ((512, 8, 64), 512, 512), ((9,), 1, 9)],
)
def test_leaves_are_matrices_of_these_sides(shape, rows, cols):
    assert _matrices.sides(shape) == (rows, cols)


COLUMNS = {
    "random": lambda x: x,
    "zero": lambda x: 0 * x,
    "one column": lambda x: x * np.float32([0, 1, 0, 0]),
    "equal": lambda x: np.repeat(x[:, :1], 4, axis=1),
    "tiny": lambda x: x * np.float32(1e-35),
    "huge": lambda x: x * np.float32(1e30),
    "lengths": lambda x: x * np.float32([1e-20, 1, 1e20, 1e-9]),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_basis_is_orthonormal_whatever_the_columns(case):
    x = COLUMNS[case](normal((50, 4)))
    basis = np.asarray(_factors.basis(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(basis.T @ basis, np.eye(4), atol=1e-5)
    if case in ("random", "tiny", "huge", "lengths"):
        unit = x / np.abs(x).max(0)
        np.testing.assert_allclose(basis @ (basis.T @ unit), unit, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1, got 0"),
        ({"rank": 1.5}, "rank must be an integer"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"residual": optax_ext.residual(step_ahead=0.1)}, "the learning rate and its sign"),
        ({"rank": 7}, r"rank=7 makes no leaf.*params\['w'\], a matrix of 16 x 12,.*at most 6"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_wrong_options(method, options, message):
    def init(**options):
        optax_ext.init_state(METHODS[method](**options), LAYER, {"data": 2})

    refused(message, init, **{"rank": 2, "axis": "data"} | options)


@both
def test_low_rank_without_matrices_is_dense_and_without_leaves_nothing(method):
    vectors = {"b": jnp.zeros(3), "scale": jnp.zeros(())}
    for params in (vectors, {}):
        state = optax_ext.init_state(METHODS[method](4, axis="data"), params, {"data": 2})
        assert state.residual.shape == (2, 1)


@pytest.mark.slow
@both
def test_xi_can_be_measured(method):
    tx = METHODS[method](RANK, axis="w")
    found, plain = (run(each, gradients()) for each in (optax_ext.measure_xi(tx, axis="w"), tx))
    same(found.updates, plain.updates)
    assert np.isfinite(found.states.xi).all()
