"""Entries that are not finite: skipped, dropped, raised or passed on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import dispatch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.test_momentum_correction import STEPS, WORKERS, gradients, run


def spoiled():
    bad = gradients()
    bad[2, 1, 7], bad[2, 0, 9], bad[4, 2, 7] = np.nan, np.inf, -np.inf
    return bad


@pytest.mark.parametrize("correction", [None, optax_ext.momentum_correction(0.9, masking=False)])
def test_dropped_entries_are_as_if_they_had_not_been(correction):
    tx = optax_ext.topk_a(0.1, axis="w", nonfinite="drop", correction=correction)
    state, (updates, (residuals, velocities, _)) = run(tx, spoiled())
    assert state.dropped.tolist() == [3] * WORKERS
    assert state.skipped.tolist() == [0] * WORKERS
    assert state.count.tolist() == [STEPS] * WORKERS
    assert np.isfinite(updates).all()
    if correction is None:
        good = np.where(np.isfinite(spoiled()), spoiled(), 0).sum(1, dtype=np.float64)
        applied = WORKERS * updates[:, 0].sum(0, dtype=np.float64)
        np.testing.assert_allclose(applied + residuals[-1].sum(0), good.sum(0), atol=1e-5)
    else:
        assert np.isfinite(velocities).all()
        np.testing.assert_array_equal(velocities[2, 1, 0, 7], velocities[1, 1, 0, 7])


def test_a_skipped_step_leaves_the_velocity():
    tx = optax_ext.dgc(0.1, axis="w", dense_steps=1)
    state, (updates, (residuals, velocities, _)) = run(tx, spoiled())
    assert state.skipped.tolist() == [2] * WORKERS
    for step in (2, 4):
        assert (updates[step] == 0).all()
        np.testing.assert_array_equal(residuals[step], residuals[step - 1])
        np.testing.assert_array_equal(velocities[step], velocities[step - 1])


def test_ignore_is_another_name_for_propagate():
    results = [
        run(optax_ext.topk_a(0.1, axis="w", nonfinite=name), spoiled())[1][0]
        for name in ("ignore", "propagate")
    ]
    np.testing.assert_array_equal(*results)
    assert np.isnan(results[0][2, :, 7]).all()


def test_raise_on_a_mesh():
    mesh = jax.make_mesh((8,), ("w",), axis_types=(AxisType.Auto,))
    tx = optax_ext.topk_a(0.1, axis="w", nonfinite="raise")
    state = optax_ext.init_state(tx, jnp.zeros(40), mesh, "w")
    specs = optax_ext.state_specs(state, "w")
    step = jax.jit(
        jax.shard_map(
            lambda s, g: tx.update(g[0], s),
            mesh=mesh,
            in_specs=(specs, P("w")),
            out_specs=(P(), specs),
        )
    )
    good = np.ones((8, 40), np.float32)
    _, state = step(state, good)
    jax.effects_barrier()
    bad = good.copy()
    bad[3, 5] = np.nan
    try:
        with pytest.raises(Exception, match="step 1: the gradient of some worker"):  # noqa: B017, PT012
            jax.block_until_ready(step(state, bad))
            jax.effects_barrier()
    finally:
        # JAX would report the failed callback again when the process ends.
        dispatch.runtime_tokens.clear()


OVERFLOWING = {
    "gtopk": sc.allreduce.gtopk(density=0.25),
    "ssar_recursive_double": sc.allreduce.ssar_recursive_double(capacity=4),
    "ring_sparse": sc.allreduce.ring_sparse(slack=1.0, fill=1.0),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_after_a_sum_that_would_overflow_training_goes_on(name):
    """Two workers have the one half of the large entries, the others the other half."""
    steps = np.ones((6, 4, 16), np.float32)
    steps[0] = 0
    steps[0, :2, :4] = steps[0, 2:, 4:8] = 2e38
    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.25), OVERFLOWING[name], axis="w", nonfinite="skip"
    )
    state, (updates, (residuals, _, _)) = run(tx, steps, axis_size=4)
    assert state.skipped.tolist() == [0] * 4
    assert state.count.tolist() == [6] * 4
    assert np.isfinite(updates).all()
    assert np.isfinite(residuals).all()
    assert (np.abs(updates).max((1, 2)) > 0).all()
    applied = 4 * updates[:, 0].sum(0, dtype=np.float64)
    kept = residuals[-1].sum(0, dtype=np.float64)
    np.testing.assert_allclose(applied + kept, steps.sum((0, 1), dtype=np.float64), rtol=1e-6)
