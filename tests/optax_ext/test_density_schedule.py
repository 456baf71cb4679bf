"""Fewer entries than the selector selects, by a schedule; nothing is lost by it."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
from tests.optax_ext.test_momentum_correction import STEPS, WORKERS, gradients, run


def test_as_many_as_the_schedule_says_and_nothing_is_lost():
    schedule = optax_ext.staged_density(2, (0.5, 0.2, 0.05))
    tx = optax_ext.topk_a(0.5, axis="w", density_schedule=schedule)
    state, (updates, (residuals, _, info)) = run(tx, gradients())
    counts = np.repeat([20, 8, 2], 2)[:, None]
    np.testing.assert_array_equal(info.selected[..., 0], np.broadcast_to(counts, (STEPS, WORKERS)))
    given = np.cumsum(gradients().sum(1, dtype=np.float64), axis=0)
    applied = np.cumsum(WORKERS * updates[:, 0].astype(np.float64), axis=0)
    np.testing.assert_allclose(applied + residuals.sum(1), given, rtol=1e-5, atol=1e-5)
    assert (state.clipped == 0).all()


def test_the_largest_are_sent_and_ties_go_by_index():
    tx = optax_ext.topk_a(1.0, axis="w", density_schedule=0.5)
    one = np.array([[[1.0, 3, 2, -2, 2, 0, 0.5, -2]]], np.float32)
    _, (updates, _) = run(tx, one, axis_size=1)
    np.testing.assert_array_equal(updates[0, 0], [0, 3, 2, -2, 2, 0, 0, 0])


def test_a_schedule_out_of_range_is_clipped_and_counted():
    tx = optax_ext.topk_a(
        0.1,
        axis="w",
        density_schedule=lambda count: jnp.array([0.9, 0.1, 0.05, jnp.nan, -1.0, 0.1])[count],
    )
    state, (_, (_, _, info)) = run(tx, gradients())
    assert info.selected[:, 0, 0].tolist() == [4, 4, 2, 1, 1, 4]
    assert state.clipped.tolist() == [3] * WORKERS


def test_constants_are_checked_when_traced():
    with pytest.raises(ValueError, match=r"density_schedule is 0.5.*4 slots"):
        run(optax_ext.topk_a(0.1, axis="w", density_schedule=lambda count: 0.5), gradients())
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\]"):
        optax_ext.topk_a(0.1, axis="w", density_schedule=1.5)


def test_helpers():
    dgc = optax_ext.staged_density(5)
    assert np.allclose([dgc(t) for t in (0, 5, 10, 15, 99)], [0.25, 0.0625, 0.015625, 0.004, 0.001])
    falling = optax_ext.exponential_density(0.4, 0.1, 2)
    assert np.allclose([falling(t) for t in range(4)], [0.4, 0.2, 0.1, 0.1])
    with pytest.raises(ValueError, match="densities is empty"):
        optax_ext.staged_density(5, ())


def test_with_ok_topk_nothing_is_lost():
    tx = optax_ext.ok_topk(
        0.2, axis="w", density_schedule=optax_ext.exponential_density(0.2, 0.05, 4)
    )
    _, (updates, (residuals, _, _)) = run(tx, gradients())
    given = gradients().sum((0, 1), dtype=np.float64)
    applied = WORKERS * updates[:, 0].sum(0, dtype=np.float64)
    np.testing.assert_allclose(applied + residuals[-1].sum(0), given, rtol=1e-5, atol=1e-5)
