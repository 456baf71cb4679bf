"""PowerSGD and ACP-SGD: against NumPy, nothing lost, words, and what is not finite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from sparse_collectives import traffic
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


@functools.cache
def gradients():
    rng = np.random.default_rng(1)
    return {
        name: np.asarray(
            rng.standard_normal(leaf.shape) + rng.standard_normal((WORKERS, STEPS, *leaf.shape)),
            np.dtype(leaf.dtype),
        )
        for name, leaf in PARAMS.items()
    }


def changed(name, at, value):
    """The gradients with something else in one of them; a copy."""
    given = {key: leaf.copy() for key, leaf in gradients().items()}
    given[name][at] = value
    return given


@functools.cache
def program(method, **options):
    tx = METHODS[method](RANK, axis="w", **options)

    def all_steps(gradient):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state)

        start = tx.init(PARAMS)
        return start, jax.lax.scan(step, start, gradient)[1]

    return jax.jit(sc.simulate(all_steps, axis="w", axis_size=WORKERS))


def run(method, given=None, **options):
    """The first state, and updates and states of all steps, ``[W, steps, ...]``."""
    start, (updates, states) = program(method, **options)(gradients() if given is None else given)
    return start, jax.tree.map(np.asarray, updates), jax.tree.map(np.asarray, states)


def matrices(flat):
    """The matrices ``f64[..., rows, cols]`` in the buffers ``[..., n]``."""
    found, start = {}, 0
    for name, (rows, cols) in MATRICES.items():
        part = np.asarray(flat, np.float64)[..., start : start + rows * cols]
        found[name], start = part.reshape(*part.shape[:-1], rows, cols), start + rows * cols
    assert start == flat.shape[-1]
    return found


def accumulated(states, given, decay=1.0):
    """``f64[W, steps, n]``: what each worker had before the exchange."""
    given = np.concatenate(
        [np.asarray(given[name], np.float64).reshape(WORKERS, STEPS, -1) for name in MATRICES],
        axis=-1,
    )
    kept = np.asarray(states.residual, np.float64)[:, :, 0]
    before = np.concatenate([np.zeros_like(kept[:, :1]), kept[:, :-1]], axis=1)
    return decay * before + given


def flat_updates(updates):
    return np.concatenate(
        [np.asarray(updates[name], np.float64).reshape(WORKERS, STEPS, -1) for name in MATRICES],
        axis=-1,
    )


def check_conserved(updates, states, acc, steps=slice(None), rtol=1e-5):
    delivered = WORKERS * flat_updates(updates)[0]
    left = delivered + np.asarray(states.residual, np.float64)[:, :, 0].sum(0)
    scale = np.abs(acc).sum(0).max()
    np.testing.assert_allclose(left[steps], acc.sum(0)[steps], rtol=0, atol=rtol * scale)


@pytest.mark.parametrize("method", ["acp_sgd", pytest.param("powersgd", marks=pytest.mark.slow)])
def test_a_step_is_what_the_paper_says(method):
    start, updates, states = run(method)
    acc = accumulated(states, gradients())
    check_conserved(updates, states, acc)
    left, right = start.allreduce if method == "acp_sgd" else (None, start.allreduce.right)
    at = [0, 0]
    for name, (rows, cols) in MATRICES.items():
        q = np.asarray(right[0, 0, at[1] :][: RANK * cols], np.float64).reshape(RANK, cols).T
        p = None if left is None else np.asarray(left[0, 0, at[0] :][: RANK * rows], np.float64)
        p = None if p is None else p.reshape(rows, RANK)
        at = [at[0] + RANK * rows, at[1] + RANK * cols]
        for step in range(STEPS):
            mine = matrices(acc)[name][:, step]
            if method == "powersgd":
                expected, kept, q = reference.powersgd(mine, q)
            else:
                expected, kept, p, q = reference.acp_sgd(mine, p, q, step)
            # bfloat16 rounds the update, and that goes back into the residuals.
            rounding = 2e-2 if name == "half" else 1e-3
            got = np.asarray(updates[name][0, step], np.float64).reshape(rows, cols)
            np.testing.assert_allclose(got, expected, atol=rounding)
            residual = matrices(states.residual[:, step, 0])[name]
            np.testing.assert_allclose(residual, kept, atol=rounding)


@both
def test_all_workers_have_the_same(method):
    _, updates, states = run(method)
    for leaf in jax.tree.leaves((updates, states.allreduce, states.count, states.info.words)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    assert (states.residual[0] != states.residual[1]).any()


@both
def test_vectors_and_small_matrices_have_the_dense_mean(method):
    start, updates, states = run(method)
    assert start.layout.dense == (True, False, False, True, False)
    assert states.residual.shape == (WORKERS, STEPS, 1, SIZE)
    for name in ("bias", "small"):
        expected = gradients()[name].mean(0)
        np.testing.assert_allclose(updates[name][0], expected, rtol=1e-5, atol=1e-6)


@both
def test_a_gradient_of_the_rank_is_delivered_whole(method):
    rng = np.random.default_rng(0)
    given = {name: np.zeros_like(leaf) for name, leaf in gradients().items()}
    common = (rng.standard_normal((18, RANK)) @ rng.standard_normal((RANK, 16))).astype(np.float32)
    given["w"][:] = common * np.arange(1, WORKERS + 1, dtype=np.float32)[:, None, None, None]
    _, updates, states = run(method, given)
    # Rows that are projected on the columns of a step before leave something for the next.
    for step in range(STEPS) if method == "powersgd" else range(1, STEPS, 2):
        left = matrices(states.residual[:, step, 0])["w"]
        assert np.abs(left).max() < 1e-4 * np.abs(common).max()
    np.testing.assert_allclose(updates["w"][0].sum(0), 2 * STEPS * common, rtol=1e-3, atol=1e-4)


@both
def test_zeros_are_no_nan_and_no_dead_end(method):
    """Two steps without a gradient, one of a single entry, and then as before."""
    given = {name: leaf.copy() for name, leaf in gradients().items()}
    for leaf in given.values():
        leaf[:, :3] = 0
    given["w"][0, 2, 4, 3] = 1.0
    _, updates, states = run(method, given)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states))
    assert not any(np.asarray(leaf[:, :2], np.float32).any() for leaf in updates.values())
    check_conserved(updates, states, accumulated(states, given))
    # Both columns of the factors are in use again.
    assert np.linalg.matrix_rank(updates["w"][0, -1], tol=1e-2) == RANK


@both
def test_one_worker_with_a_nan_makes_all_skip_the_step(method):
    given = changed("conv", (1, 2, 0, 0, 0, 0), np.nan)
    _, updates, states = run(method, given)
    assert states.skipped[:, -1].tolist() == [1] * WORKERS
    assert states.count[:, -1].tolist() == [STEPS - 1] * WORKERS
    for leaf in updates.values():
        assert not np.asarray(leaf[:, 2], np.float32).any()
    np.testing.assert_array_equal(states.residual[:, 2], states.residual[:, 1])
    for leaf in jax.tree.leaves(states.allreduce):
        np.testing.assert_array_equal(leaf[:, 2], leaf[:, 1])
    # The next step has the phase of the one that was skipped.
    assert states.info.words[0, 3] == run(method)[2].info.words[0, 2]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states))


@both
def test_a_sum_that_is_too_large_stays_with_the_workers(method):
    given = changed("w", (2, 1, 0, 0), 3e38)
    _, updates, states = run(method, given)
    assert states.withheld[0].tolist() == [18 * 16 * step for step in range(STEPS)]
    assert not updates["w"][:, 1:].any()
    assert (updates["conv"][:, 1:] != 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states))
    acc = matrices(accumulated(states, given))["w"]
    left = matrices(states.residual[:, :, 0])["w"]
    np.testing.assert_array_equal(left[:, 1:], acc[:, 1:].astype(np.float32))


def test_dropped_entries_and_residuals_in_bfloat16_that_decay():
    given = changed("w", (2, 1, 0, 0), np.inf)
    how = optax_ext.residual(jnp.bfloat16, decay=0.75)
    _, updates, states = run("powersgd", given, nonfinite="drop", residual=how)
    assert states.dropped[0].tolist() == [0] + [1] * (STEPS - 1)
    assert states.residual.dtype == jnp.bfloat16
    given["w"][2, 1, 0, 0] = 0
    check_conserved(updates, states, accumulated(states, given, 0.75), rtol=2e-2)


@pytest.mark.slow
@both
def test_propagate_passes_it_on(method):
    given = changed("w", (2, 1, 0, 0), np.inf)
    _, updates, _ = run(method, given, nonfinite="propagate")
    assert np.isnan(updates["w"][:, 1]).any()
    assert np.isfinite(updates["conv"]).all()


@pytest.mark.parametrize("method", ["acp_sgd", pytest.param("powersgd", marks=pytest.mark.slow)])
def test_dense_steps_leave_residuals_and_factors_alone(method):
    start, updates, states = run(method, dense_steps=2)
    for name in ("conv", "w"):
        expected = gradients()[name].mean(0)[:2]
        np.testing.assert_allclose(updates[name][0, :2], expected, rtol=1e-4, atol=1e-5)
    assert not states.residual[:, :2].any()
    for before, after in zip(jax.tree.leaves(start.allreduce), jax.tree.leaves(states.allreduce)):
        np.testing.assert_array_equal(after[:, 1], before)
    assert states.info.delivered[0].tolist() == [SIZE] * STEPS
    acc = accumulated(states, gradients())
    check_conserved(updates, states, acc, slice(3, None))
    np.testing.assert_allclose(states.info.words[0, 0], 2 * (SIZE + DENSE) * 2 / 3)


ROWS, COLS = 24 + 20 + 18, 14 + 5 + 16


def step_words(method, rows):
    """Of one step, but for (P - 1) / P."""
    if method == "powersgd":
        return 2 * (RANK * (ROWS + COLS) + DENSE)
    return 2 * (RANK * (ROWS if rows else COLS) + DENSE)


@both
def test_words_are_those_of_the_formula(method):
    words = run(method)[2].info.words[0]
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
