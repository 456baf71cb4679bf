"""PowerSGD and ACP-SGD: against NumPy, words, and what is too large.

That nothing is lost, all agree and a skipped step changes nothing: test_contract.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
from sparse_collectives import traffic
from tests.optax_ext.helpers import flat, normal, run, slow
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


@functools.lru_cache
def transformation(method, **options):
    return METHODS[method](RANK, axis="w", **options)


def steps_of(method, given=None, **options):
    tx = transformation(method, **options)
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


def of_matrices(tree):
    return flat({name: tree[name] for name in MATRICES}, (STEPS, WORKERS))


def accumulated(found, given, decay=1.0):
    """``f64[steps, W, n]``: what each worker had before the exchange."""
    kept = found.residuals.astype(np.float64)
    return decay * np.concatenate([np.zeros_like(kept[:1]), kept[:-1]]) + of_matrices(given)


def check_conserved(found, acc, steps=slice(None), rtol=1e-5):
    delivered = WORKERS * of_matrices(found.updates)[:, 0]
    left, scale = delivered + found.residuals.astype(np.float64).sum(1), np.abs(acc).sum(1).max()
    np.testing.assert_allclose(left[steps], acc.sum(1)[steps], rtol=0, atol=rtol * scale)


@one_slow
def test_a_step_is_what_the_paper_says(method):
    start, found = steps_of(method)
    acc = accumulated(found, gradients())
    check_conserved(found, acc)
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


@both
def test_vectors_and_small_matrices_have_the_dense_mean(method):
    start, found = steps_of(method)
    assert start.layout.dense == (True, False, False, True, False)
    assert found.residuals.shape == (STEPS, WORKERS, SIZE)
    for name in ("bias", "small"):
        expected = gradients()[name].mean(1)
        np.testing.assert_allclose(found.updates[name][:, 0], expected, rtol=1e-5, atol=1e-6)


@both
def test_a_gradient_of_the_rank_is_delivered_whole(method):
    given = {name: np.zeros_like(leaf) for name, leaf in gradients().items()}
    common = normal((18, RANK), 1) @ normal((RANK, 16), 2)
    given["w"][:] = common * np.arange(1, WORKERS + 1, dtype=np.float32)[:, None, None]
    _, found = steps_of(method, given)
    # Rows that are projected on the columns of a step before leave something for the next.
    for step in range(STEPS) if method == "powersgd" else range(1, STEPS, 2):
        left = matrices(found.residuals[step])["w"]
        assert np.abs(left).max() < 1e-4 * np.abs(common).max()
    total = found.updates["w"][:, 0].sum(0)
    np.testing.assert_allclose(total, 2 * STEPS * common, rtol=1e-3, atol=1e-4)


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
    check_conserved(found, accumulated(found, given))
    # Both columns of the factors are in use again.
    assert np.linalg.matrix_rank(found.updates["w"][-1, 0], tol=1e-2) == RANK


@both
def test_a_sum_that_is_too_large_stays_with_the_workers(method):
    given = changed("w", (1, 2, 0, 0), 3e38)
    _, found = steps_of(method, given)
    assert found.state.withheld[:, 0].tolist() == [18 * 16 * step for step in range(STEPS)]
    assert not found.updates["w"][1:].any()
    assert (found.updates["conv"][1:] != 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.states))
    acc = matrices(accumulated(found, given))["w"].astype(np.float32)
    np.testing.assert_array_equal(matrices(found.residuals)["w"][1:], acc[1:])


def test_dropped_entries_and_residuals_in_bfloat16_that_decay():
    given = changed("w", (1, 2, 0, 0), np.inf)
    how = optax_ext.residual(jnp.bfloat16, decay=0.75)
    _, found = steps_of("powersgd", given, nonfinite="drop", residual=how)
    assert found.state.dropped[:, 0].tolist() == [0] + [1] * (STEPS - 1)
    assert found.residuals.dtype == jnp.bfloat16
    given["w"][1, 2, 0, 0] = 0
    check_conserved(found, accumulated(found, given, 0.75), rtol=2e-2)


@pytest.mark.slow
@both
def test_propagate_passes_it_on(method):
    _, found = steps_of(method, changed("w", (1, 2, 0, 0), np.inf), nonfinite="propagate")
    assert np.isnan(found.updates["w"][1]).any()
    assert np.isfinite(found.updates["conv"]).all()


@one_slow
def test_dense_steps_leave_residuals_and_factors_alone(method):
    start, found = steps_of(method, dense_steps=2)
    for name in ("conv", "w"):
        expected = gradients()[name].mean(1)[:2]
        np.testing.assert_allclose(found.updates[name][:2, 0], expected, rtol=1e-4, atol=1e-5)
    assert not found.residuals[:2].any()
    for before, after in zip(
        jax.tree.leaves(start.allreduce), jax.tree.leaves(found.state.allreduce), strict=True
    ):
        np.testing.assert_array_equal(after[1], before)
    assert found.state.info.delivered[:, 0].tolist() == [SIZE] * STEPS
    check_conserved(found, accumulated(found, gradients()), slice(3, None))
    np.testing.assert_allclose(found.state.info.words[0, 0], 2 * (SIZE + DENSE) * 2 / 3)


ROWS, COLS = 24 + 20 + 18, 14 + 5 + 16


def step_words(method, rows):
    """Of one step, but for (P - 1) / P."""
    if method == "powersgd":
        return 2 * (RANK * (ROWS + COLS) + DENSE)
    return 2 * (RANK * (ROWS if rows else COLS) + DENSE)


@both
def test_words_are_those_of_the_formula(method):
    words = steps_of(method)[1].state.info.words[:, 0]
    expected = [step_words(method, rows=step % 2 == 0) * 2 / 3 for step in range(STEPS)]
    np.testing.assert_allclose(words, expected, rtol=1e-6)


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


@both
def test_a_step_of_the_size_of_a_model_lowers_for_cuda(method):
    params = {
        "w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32),
        "conv": jax.ShapeDtypeStruct((3, 3, 256, 512), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((1024,), jnp.float32),
    }
    tx = METHODS[method](4, axis="data", dense_steps=10)
    mesh = AbstractMesh((16,), ("data",), axis_types=(AxisType.Auto,))
    state = jax.eval_shape(lambda g: optax_ext.init_state(tx, g, {"data": 16}), params)
    specs = optax_ext.state_specs(state)

    def local(gradient, state):
        return tx.update(jax.lax.pcast(gradient, "data", to="varying"), state)

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs))
    lowered = jax.jit(step).trace(params, state).lower(lowering_platforms=("cuda",))
    assert "stablehlo" in lowered.as_text()
