"""Fewer entries than the selector selects, by a schedule; nothing is lost by it."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives.select import exponential_density, scheduled, staged_density, topk
from tests.optax_ext.test_momentum_correction import STEPS, WORKERS, gradients, run


def topk_a(density, schedule, **options):
    selector = scheduled(topk(density=density), schedule)
    return optax_ext.topk_a(density, axis="w", selector=selector, **options)


def check_conservation(updates, residuals):
    given = np.cumsum(gradients().sum(1, dtype=np.float64), axis=0)
    applied = np.cumsum(WORKERS * updates[:, 0].astype(np.float64), axis=0)
    np.testing.assert_allclose(applied + residuals.sum(1), given, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_as_many_as_the_schedule_says_and_nothing_is_lost():
    state, (updates, (residuals, _, info)) = run(
        topk_a(0.5, staged_density(2, (0.5, 0.2, 0.05))), gradients()
    )
    counts = np.repeat([20, 8, 2], 2)[:, None]
    np.testing.assert_array_equal(info.selected[..., 0], np.broadcast_to(counts, (STEPS, WORKERS)))
    check_conservation(updates, residuals)
    assert (state.selector.clipped == 0).all()
    assert (state.selector.count == STEPS).all()


@pytest.mark.slow
@pytest.mark.parametrize("bad_step", [None, 3])
def test_steps_that_select_nothing_do_not_count(bad_step):
    """Dense ones to begin with, and skipped ones: the schedule begins, or goes on, behind them."""
    given, counts = gradients(), [0, 0, 20, 8, 2, 2]
    if bad_step is not None:
        given[bad_step, 1, 7] = np.nan
        counts = [0, 0, 20, 20, 8, 2]
    tx = topk_a(0.5, staged_density(1, (0.5, 0.2, 0.05)), dense_steps=2)
    state, (_, (_, _, info)) = run(tx, given)
    steps = [step for step in range(2, STEPS) if step != bad_step]
    assert info.selected[steps, 0, 0].tolist() == [counts[step] for step in steps]
    assert state.selector.count.tolist() == [[len(steps)]] * WORKERS


@pytest.mark.slow
def test_the_largest_are_sent_and_ties_go_by_index():
    one = np.array([[[1.0, 3, 2, -2, 2, 0, 0.5, -2]]], np.float32)
    _, (updates, _) = run(topk_a(1.0, 0.5), one, axis_size=1)
    np.testing.assert_array_equal(updates[0, 0], [0, 3, 2, -2, 2, 0, 0, 0])


@pytest.mark.slow
def test_a_schedule_out_of_range_is_clipped_and_counted():
    tx = topk_a(0.1, lambda count: jnp.array([0.9, 0.1, 0.05, jnp.nan, -1.0, 0.1])[count])
    state, (_, (_, _, info)) = run(tx, gradients())
    assert info.selected[:, 0, 0].tolist() == [4, 4, 2, 1, 1, 4]
    assert state.selector.clipped.tolist() == [[3]] * WORKERS
    # Counted alike by all workers, and so once.
    assert float(optax_ext.metrics(state)["clipped"]) == 3


def test_constants_are_checked_when_traced():
    with pytest.raises(ValueError, match=r"schedule is 0.5.*4 slots"):
        run(topk_a(0.1, lambda count: 0.5), gradients())
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\]"):
        topk_a(0.1, 1.5)


def test_helpers():
    dgc = staged_density(5)
    assert np.allclose([dgc(t) for t in (0, 5, 10, 15, 99)], [0.25, 0.0625, 0.015625, 0.004, 0.001])
    falling = exponential_density(0.4, 0.1, 2)
    assert np.allclose([falling(t) for t in range(4)], [0.4, 0.2, 0.1, 0.1])
    with pytest.raises(ValueError, match="densities is empty"):
        staged_density(5, ())


@pytest.mark.slow
def test_with_ok_topk_nothing_is_lost():
    selector = scheduled(topk(density=0.2), exponential_density(0.2, 0.05, 4))
    _, (updates, (residuals, _, info)) = run(
        optax_ext.ok_topk(0.2, axis="w", selector=selector), gradients()
    )
    assert info.selected[:, 0, 0].tolist() == [8, 6, 4, 3, 2, 2]
    check_conservation(updates, residuals)


def test_a_checkpoint_says_which_schedule_it_was():
    def metadata(schedule):
        state = optax_ext.init_state(topk_a(0.5, schedule), jnp.zeros(40), {"w": 2})
        return optax_ext.checkpoint_metadata(state)["sparse"][""]["selector"]

    staged = metadata(staged_density(2, (0.5, 0.1)))
    assert "staged_density(densities=(0.5, 0.1), steps_per_stage=2)" in staged
    assert "topk(density=0.5)" in staged
    assert metadata(staged_density(3, (0.5, 0.1))) != staged
    assert metadata(0.25) != metadata(0.5)
    # The code of a function is not the same text in every program.
    assert metadata(lambda count: 0.1) == metadata(lambda count: 0.2)
    assert isinstance(topk_a(0.5, 0.1), tuple)
    assert sc.select.ScheduledState._fields == ("count", "clipped", "inner")
