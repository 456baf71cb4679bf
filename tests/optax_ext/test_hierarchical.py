"""Error feedback on the shards of a hierarchical allreduce."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import mapped, mesh, normal, run, same, train
from tests.reference import hierarchical as oracle

AXES = ("node", "device")
SIZE, DENSITY, STEPS = 101, 0.1, 5
TOPK_A = sc.allreduce.topk_a()


def transformation(outer=TOPK_A, inner_axis="device", **options):
    options = {"axis": AXES, **options}
    return optax_ext.sparse_allreduce(
        sc.select.topk(density=DENSITY),
        sc.allreduce.hierarchical(inner_axis=inner_axis, outer=outer),
        **options,
    )


def gradients(shape):
    return normal((STEPS, *shape, SIZE))


def simulated(shape, outer=TOPK_A):
    return run(transformation(outer), gradients(shape), AXES)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2), (1, 4), (2, 1)])
def test_it_is_algorithm_2_of_the_paper(shape):
    found = simulated(shape)
    workers = shape[0] * shape[1]
    shard = -(-SIZE // shape[1])
    k = round(DENSITY * shard)
    kept = np.zeros((*shape, shard), np.float32)
    for step, gradient in enumerate(gradients(shape)):
        total, kept = oracle.training_step(gradient, kept, k)
        np.testing.assert_allclose(found.updates[step, 0, 0], total / workers, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.residuals[step], kept, rtol=1e-4, atol=1e-5)
        assert (found.state.info.delivered[step] == np.count_nonzero(total)).all()


OK_TOPK = sc.allreduce.ok_topk(density=DENSITY, slack=1.0)


@pytest.mark.slow
def test_with_one_worker_in_a_node_it_is_the_flat_algorithm():
    found, flat = simulated((2, 1)), gradients((2, 1))[:, :, 0]
    expected = run(optax_ext.topk_a(DENSITY, axis="w"), flat)
    np.testing.assert_array_equal(found.updates[:, :, 0], expected.updates)
    np.testing.assert_array_equal(found.residuals[:, :, 0], expected.residuals)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh_it_does_what_it_does_in_simulation(check_vma):
    shape, on = (3, 2), mesh((3, 2), AXES)
    tx = transformation(OK_TOPK)
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), on)
    specs = optax_ext.state_specs(state)
    assert state.residual.shape == (6, 51)
    assert state.allreduce.boundaries.shape == (2, 4)
    assert specs.residual == P(AXES)
    assert specs.allreduce.boundaries == P("device")
    step, expected = mapped(tx, on, state, check_vma=check_vma), simulated(shape, OK_TOPK)
    for i, gradient in enumerate(gradients(shape)):
        updates, state = step(gradient.reshape(6, SIZE), state)
        np.testing.assert_allclose(updates, expected.updates[i, 0, 0], rtol=1e-5, atol=1e-6)
        residuals = expected.residuals[i].reshape(6, -1)
        np.testing.assert_allclose(state.residual, residuals, atol=1e-5)


def test_train_step_with_a_schedule_and_a_gradient_that_is_not_finite():
    tx = optax.chain(transformation(local=optax.scale(0.5)), optax.scale(-1.0))
    params = {"a": jnp.ones((4, 3)), "b": jnp.zeros(5)}

    def loss_fn(params, x):
        return jnp.mean((x @ params["a"]) ** 2) + jnp.sum((params["b"] - jnp.mean(x)) ** 2)

    batches = [normal((8, 4))] * 11
    batches[10] = batches[0].copy()
    batches[10][3, 1] = np.nan  # one worker of one node
    results = train(tx, loss_fn, params, batches, mesh((2, 2), AXES))
    assert float(results[10][2]) < 0.7 * float(results[1][2])
    same(results[11][0], results[10][0])
    before, after = (optax_ext.get_state(state) for _, state, _ in results[10:])
    assert after.skipped == 1
    np.testing.assert_array_equal(after.residual, before.residual)


def test_what_is_wrong_with_a_call():
    with pytest.raises(ValueError, match="must name the axis of the nodes and inner_axis='device'"):
        transformation(axis="node")
    with pytest.raises(ValueError, match=r"jax\.pmap has one axis only"):
        transformation(axis="device")
    with pytest.raises(ValueError, match=r"axis=\('node', 'device'\) is not bound"):
        transformation().init(jnp.ones(3))
    with pytest.raises(ValueError, match=r"axis=\('node', 'device'\).*is not an axis of the mesh"):
        optax_ext.init_state(transformation(), jnp.ones(3), {"node": 4})


def test_the_state_of_all_workers_on_one_device_is_that_of_a_mesh():
    tx = transformation(OK_TOPK, correction=optax_ext.momentum_correction(0.9))
    params = {"a": jnp.zeros((9, 10)), "b": jnp.zeros(11)}
    here = optax_ext.init_state(tx, params, {"node": 3, "device": 2})
    there = optax_ext.init_state(tx, params, mesh((3, 2), AXES))
    same(here, there)
