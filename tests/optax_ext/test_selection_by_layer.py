"""Selectors that work by layer get the parameters' layout, with any allreduce."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
import sparse_collectives as sc
from tests import jax_internals

SHAPES = {"embed": (12, 6), "kernel": (20, 9), "bias": (9,)}


def gradients(workers, steps, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal((steps, workers, *shape)).astype(np.float32)
        # One layer's gradients are far larger than the others'.
        * (1000 if name == "embed" else 1)
        for name, shape in SHAPES.items()
    }


@pytest.mark.slow
def test_every_row_of_the_parameters_is_updated():
    tx = optax_ext.sparse_allreduce(sc.select.adtopk(density=0.1), sc.allreduce.dense(), axis="w")
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2)
    updates = step({name: g[0] for name, g in gradients(2, 1).items()})
    for name, shape in SHAPES.items():
        rows = np.asarray(updates[name][0]).reshape(-1, shape[-1] if len(shape) > 1 else 1)
        assert (rows != 0).any(axis=0).all(), name


@pytest.mark.slow
def test_a_selection_of_the_whole_leaves_small_layers_out_and_layerwise_does_not():
    def updated(selector):
        tx = optax_ext.sparse_allreduce(selector, sc.allreduce.dense(), axis="w")
        step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2)
        updates = step({name: g[0] for name, g in gradients(2, 1).items()})
        return {name for name, update in updates.items() if np.asarray(update).any()}

    selector = sc.select.topk(density=0.1)
    assert updated(selector) == {"embed"}
    assert updated(sc.select.layerwise(selector)) == set(SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "selector",
    [
        sc.select.adtopk_threshold(density=0.1, steps=6, warmup=2, period=2),
        sc.select.layerwise(sc.select.threshold_reuse(density=0.1)),
    ],
    ids=["adtopk_threshold", "layerwise"],
)
def test_trains_on_a_mesh_and_loses_nothing(selector):
    workers, steps = 4, 6
    mesh = jax.make_mesh(
        (workers,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )
    allreduce = sc.allreduce.ok_topk(density=0.1)
    tx = optax_ext.sparse_allreduce(selector, allreduce, axis="w")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {name: jnp.zeros(shape, device=everywhere) for name, shape in SHAPES.items()}
    state = optax_ext.init_state(tx, params, mesh)
    specs = optax_ext.state_specs(state)
    spec = jax.sharding.PartitionSpec

    def local(params, state, gradient):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], gradient), state)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(spec(), specs, spec("w")), out_specs=(spec(), specs)
        )
    )
    given = gradients(workers, steps)
    for i in range(steps):
        params, state = step(params, state, {name: g[i] for name, g in given.items()})
    assert jax_internals.programs(step) == 1
    residual = np.asarray(state.residual, np.float64).sum(axis=0)
    flat = np.concatenate([np.ravel(params[name]) for name in sorted(SHAPES)])
    given = np.concatenate(
        [g.astype(np.float64).sum(axis=(0, 1)).ravel() for _, g in sorted(given.items())]
    )
    # Float32 sums of 24 gradients of up to 3,000.
    np.testing.assert_allclose(workers * flat + residual, given, atol=0.02)
