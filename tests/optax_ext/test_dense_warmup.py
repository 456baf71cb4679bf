"""Dense steps first, or last, in the same program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.test_momentum_correction import SIZE, STEPS, WORKERS, gradients, run


@pytest.mark.slow
@pytest.mark.parametrize("alias", [optax_ext.topk_a, optax_ext.ok_topk])
def test_dense_first_then_sparse_and_nothing_is_lost(alias):
    _, (updates, (residuals, _, info)) = run(alias(0.1, axis="w", dense_steps=3), gradients())
    np.testing.assert_allclose(updates[:3, 0], gradients()[:3].mean(1), rtol=1e-5, atol=1e-6)
    assert (residuals[:3] == 0).all()
    assert (info.delivered[:3] == SIZE).all()
    np.testing.assert_allclose(info.words[:3], 2 * SIZE * (WORKERS - 1) / WORKERS)
    assert (info.selected[3:] == 4).all()
    given = np.cumsum(gradients().sum(1, dtype=np.float64), axis=0)
    applied = np.cumsum(WORKERS * updates[:, 0].astype(np.float64), axis=0)
    np.testing.assert_allclose(applied + residuals.sum(1), given, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "nonfinite"), [(optax_ext.topk_a, "skip"), (optax_ext.ok_topk, "drop")]
)
def test_sparse_first_then_dense_and_nothing_waits(alias, nonfinite):
    """As in MSTopK's run for DAWNBench; a step that is skipped delivers nothing that waits."""
    last, given = STEPS // 2, gradients()
    if nonfinite == "skip":
        given[last, 1, 3] = np.nan
    tx = alias(0.1, axis="w", dense_steps=lambda step: step >= last, nonfinite=nonfinite)
    state, (updates, (residuals, _, info)) = run(tx, given)
    assert (np.abs(residuals[:last]).sum(axis=(1, 2)) > 0).all()
    if nonfinite == "skip":
        np.testing.assert_array_equal(residuals[last], residuals[last - 1])
        assert not updates[last].any()
        given[last] = 0
        last += 1
    assert (residuals[last:] == 0).all()
    assert (info.delivered[last:] == SIZE).all()
    given = np.cumsum(given.sum(1, dtype=np.float64), axis=0)
    applied = np.cumsum(WORKERS * updates[:, 0].astype(np.float64), axis=0)
    np.testing.assert_allclose(applied + residuals.sum(1), given, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_momentum_is_the_usual_one_meanwhile():
    tx = optax_ext.dgc(0.1, axis="w", dense_steps=STEPS)
    _, (updates, _) = run(tx, gradients())
    dense = optax.chain(optax_ext.dense(axis="w"), optax.trace(0.9))
    _, (expected, _) = run(dense, gradients())
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_on_a_mesh_all_of_it_at_once():
    mesh = jax.make_mesh((8,), ("w",), axis_types=(AxisType.Auto,))
    tx = optax_ext.dgc(
        0.2,
        axis="w",
        max_norm=4.0,
        dense_steps=2,
        selector=sc.select.scheduled(
            sc.select.dgc(density=0.2), sc.select.exponential_density(0.2, 0.05, 4)
        ),
        nonfinite="drop",
    )
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), mesh)
    specs = optax_ext.state_specs(state)
    step = jax.jit(
        jax.shard_map(
            lambda s, g: tx.update(g[0], s),
            mesh=mesh,
            in_specs=(specs, P("w")),
            out_specs=(P(), specs),
        )
    )
    steps = gradients(8)
    _, (expected, (residuals, _, _)) = run(tx, steps, axis_size=8)
    for i, gradient in enumerate(steps):
        updates, state = step(state, gradient)
        np.testing.assert_allclose(updates, expected[i, 0], rtol=1e-5, atol=1e-6)
    residual = optax_ext.get_state(state).residual
    np.testing.assert_allclose(residual, residuals[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_with_a_hierarchy():
    tx = optax_ext.hitopk(0.1, axis=("n", "d"), inner_axis="d", dense_steps=2)
    mesh = jax.make_mesh((2, 2), ("n", "d"), axis_types=(AxisType.Auto,) * 2)
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), mesh)
    specs = optax_ext.state_specs(state)
    step = jax.jit(
        jax.shard_map(
            lambda s, g: tx.update(g[0], s),
            mesh=mesh,
            in_specs=(specs, P(("n", "d"))),
            out_specs=(P(), specs),
        )
    )
    for gradient in gradients(4)[:2]:
        updates, state = step(state, gradient)
        np.testing.assert_allclose(updates, gradient.mean(0), rtol=1e-5, atol=1e-6)
    assert (np.asarray(state.residual) == 0).all()
    assert state.info.delivered == SIZE
