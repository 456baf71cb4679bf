"""Residuals in bfloat16, and residuals that decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._step import _accumulation
from tests.optax_ext.helpers import normal, run, slow

WORKERS, STEPS = 3, 6
BF16 = optax_ext.residual(jnp.bfloat16)


def gradients():
    return normal((STEPS, WORKERS, 40))


def stored(value):
    return sc.simulate(
        lambda x: _accumulation.store(x, BF16, axis="w", count=jnp.int32(0)), axis="w", axis_size=1
    )(value[None, None])[0, 0]


def test_what_bfloat16_holds_is_kept_and_nothing_becomes_infinite():
    values = np.float32([0, -0.0, 1, -2.5, 3e38, np.inf, -np.inf, np.nan, 1e-40])
    exact = np.asarray(jnp.asarray(values).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(stored(jnp.asarray(exact)), np.float32), exact)
    largest = np.full(1000, np.finfo(np.float32).max)
    assert np.isfinite(np.asarray(stored(jnp.asarray(largest)), np.float32)).all()
    quiet = np.uint32([0x7F800001]).view(np.float32)  # a NaN whose payload is in the lower half
    assert np.isnan(np.asarray(stored(jnp.asarray(quiet)), np.float32)).all()


@pytest.mark.slow
def test_small_gradients_add_up_in_bfloat16():
    # Each is a thousandth of what the residual holds: rounded to the nearest it would vanish.
    steps, size = 400, 256

    def train(start):
        tx = optax_ext.topk_a(1 / size, axis="w", residual=BF16)
        state = tx.init(start)
        state = state._replace(residual=jnp.ones((1, size), jnp.bfloat16))
        # The one entry that is sent is always the first.
        gradient = jnp.full(size, 1e-3).at[0].set(100.0)

        def step(state, _):
            return tx.update(gradient, state)[1], ()

        return jax.lax.scan(step, state, length=steps)[0].residual

    residual = sc.simulate(train, axis="w", axis_size=1)(jnp.zeros((1, size)))
    rest = np.asarray(residual[0, 0, 1:], np.float64)
    # 1 + 0.4; the mean of 255 walks whose steps of 2**-7 come with probability 0.128.
    deviation = np.sqrt(steps * 0.128) / 128 / np.sqrt(size)
    assert abs(rest.mean() - 1.4) < 5 * deviation


@pytest.mark.parametrize("exponent", [-66, 40])
def test_how_much_is_rounded_off_does_not_depend_on_the_size_of_the_gradients(exponent):
    """No number is subnormal at 1e-20: all bits are those at 1, but for the exponent."""
    tx = optax_ext.topk_a(0.1, axis="w", residual=BF16)
    scale = np.float32(2.0**exponent)
    plain, scaled = run(tx, gradients()), run(tx, gradients() * scale)
    np.testing.assert_array_equal(scaled.updates, plain.updates * scale)
    residuals, of_scaled = (x.residuals.astype(np.float32) for x in (plain, scaled))
    np.testing.assert_array_equal(of_scaled, residuals * scale)


def test_what_is_missing_in_bfloat16_is_within_its_bound_and_cancels():
    tx = optax_ext.topk_a(0.1, axis="w", residual=BF16)
    rng = np.random.default_rng(1)
    given = (1e-20 * rng.standard_normal((12, WORKERS, 4000))).astype(np.float32)
    found = run(tx, given)
    assert found.residuals.dtype == jnp.bfloat16
    updates, kept = found.updates, found.residuals.astype(np.float64)
    before = np.concatenate([np.zeros((1, *kept.shape[1:])), kept[:-1]])
    missing = WORKERS * updates[:, 0].astype(np.float64) + (kept - before - given).sum(1)
    bound = 2.0**-7 * np.abs(kept).sum(1) + 2.0**-22 * np.abs(before + given).sum(1)
    assert (np.abs(missing) <= bound).all()
    assert (missing != 0).mean() > 0.5
    # A rounding to one of two neighbors, 2^-7 of it apart at most, has a deviation of half of that
    # at most; six of the sum's, as every draw is independent.
    deviation = 2.0**-8 * np.sqrt((kept**2).sum())
    assert abs(missing.sum()) < 6 * deviation


@pytest.mark.parametrize("policy", [slow("skip"), "drop"])
def test_what_is_finite_after_the_decay_is_accumulated(policy):
    how = optax_ext.residual(decay=0.5)
    tx = optax_ext.topk_a(0.5, axis="w", residual=how, nonfinite=policy)

    def step(gradient):
        state = tx.init(gradient)
        state = state._replace(residual=jnp.full_like(state.residual, 3e38))
        updates, state = tx.update(gradient, state)
        return updates, state

    gradient = jnp.full((1, 4), 1e38, jnp.float32)
    updates, state = sc.simulate(step, axis="w", axis_size=1)(gradient)
    assert int(state.skipped[0]) == int(state.dropped[0]) == 0
    total = np.asarray(updates[0], np.float64) + np.asarray(state.residual[0, 0], np.float64)
    np.testing.assert_allclose(total, 2.5e38, rtol=1e-6)
