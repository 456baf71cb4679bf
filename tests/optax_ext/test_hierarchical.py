"""Error feedback on the shards of a hierarchical allreduce."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests import jax_internals
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
    return np.random.default_rng(0).standard_normal((STEPS, *shape, SIZE)).astype(np.float32)


@functools.cache
def simulated(shape, outer=TOPK_A):
    """Updates, residuals and infos of some steps, ``[STEPS, m, w, ...]``."""
    tx = transformation(outer)

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state.residual[0], state.info)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    run = sc.simulate(train, axis=AXES, axis_size=shape, in_axes=1, out_axes=1)
    return jax.tree.map(np.asarray, run(gradients(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2), (1, 4), (2, 1)])
def test_it_is_algorithm_2_of_the_paper(shape):
    updates, residuals, info = simulated(shape)
    workers = shape[0] * shape[1]
    shard = -(-SIZE // shape[1])
    k = round(DENSITY * shard)
    kept = np.zeros((*shape, shard), np.float32)
    for step, gradient in enumerate(gradients(shape)):
        total, kept = oracle.training_step(gradient, kept, k)
        np.testing.assert_allclose(updates[step, 0, 0], total / workers, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(residuals[step], kept, rtol=1e-4, atol=1e-5)
        assert (info.delivered[step] == np.count_nonzero(total)).all()


OUTERS = {
    "agreed": sc.allreduce.agreed(),
    "topk_a": TOPK_A,
    "gtopk": sc.allreduce.gtopk(density=DENSITY),
    "spardl": sc.allreduce.spardl(density=DENSITY),
    "ok_topk": sc.allreduce.ok_topk(density=DENSITY, slack=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTERS)
def test_nothing_is_lost_and_all_workers_agree(name):
    shape = (3, 2)
    updates, residuals, info = simulated(shape, OUTERS[name])
    before = np.zeros(SIZE)
    for step, gradient in enumerate(gradients(shape)):
        assert (updates[step] == updates[step, 0, 0]).all()
        # The shards of a node side by side, summed over the nodes.
        after = residuals[step].reshape(shape[0], -1)[:, :SIZE].sum(axis=0, dtype=np.float64)
        total = 6 * updates[step, 0, 0]
        acc = before + gradient.sum(axis=(0, 1), dtype=np.float64)
        np.testing.assert_allclose(acc, total + after, rtol=1e-5, atol=1e-5)
        before = after
    for field in (info.delivered, info.global_threshold, info.words):
        assert (field == field[:, :1, :1]).all()


@pytest.mark.slow
def test_with_one_worker_in_a_node_it_is_the_flat_algorithm():
    updates, residuals, _ = simulated((2, 1))
    tx = optax_ext.topk_a(DENSITY, axis="workers")

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state.residual[0])

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    flat, kept = sc.simulate(train, axis_size=2, in_axes=1, out_axes=1)(gradients((2, 1))[:, :, 0])
    np.testing.assert_array_equal(updates[:, :, 0], flat)
    np.testing.assert_array_equal(residuals[:, :, 0], kept)


def mesh(shape):
    devices = np.asarray(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh_it_does_what_it_does_in_simulation(check_vma):
    shape, outer = (3, 2), OUTERS["ok_topk"]
    tx = transformation(outer)
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), mesh(shape))
    specs = optax_ext.state_specs(state)
    assert state.residual.shape == (6, 51)
    assert state.allreduce.boundaries.shape == (2, 4)
    assert specs.residual == P(AXES)
    assert specs.allreduce.boundaries == P("device")
    step = jax.jit(
        jax.shard_map(
            lambda state, gradient: tx.update(gradient[0], state),
            mesh=mesh(shape),
            in_specs=(specs, P(AXES)),
            out_specs=(P(), specs),
            check_vma=check_vma,
        ),
        donate_argnums=0,
    )
    expected, residuals, _ = simulated(shape, outer)
    for i, gradient in enumerate(gradients(shape)):
        updates, state = step(state, gradient.reshape(6, SIZE))
        np.testing.assert_allclose(updates, expected[i, 0, 0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.residual, residuals[i].reshape(6, -1), atol=1e-5)
    assert jax_internals.programs(step) == 1


def test_train_step_with_a_schedule_and_a_gradient_that_is_not_finite():
    tx = optax.chain(transformation(local=optax.scale(0.5)), optax.scale(-1.0))
    params = {"a": jnp.ones((4, 3)), "b": jnp.zeros(5)}

    def loss_fn(params, x):
        return jnp.mean((x @ params["a"]) ** 2) + jnp.sum((params["b"] - jnp.mean(x)) ** 2)

    state = optax_ext.init_state(tx, params, mesh((2, 2)))
    step = optax_ext.make_train_step(loss_fn, tx, mesh((2, 2)), donate=False)
    batch = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    losses = []
    for _ in range(10):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    batch[3, 1] = np.nan  # one worker of one node
    after, skipped, _ = step(params, state, batch)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert optax_ext.get_state(skipped).skipped == 1
    np.testing.assert_array_equal(
        optax_ext.get_state(skipped).residual, optax_ext.get_state(state).residual
    )


def test_what_is_wrong_with_a_call():
    with pytest.raises(ValueError, match="must name the axis of the nodes and inner_axis='device'"):
        transformation(axis="node")
    with pytest.raises(ValueError, match=r"jax\.pmap has one axis only"):
        transformation(axis="device")
    with pytest.raises(ValueError, match=r"axis=\('node', 'device'\) is not bound"):
        transformation().init(jnp.ones(3))
    with pytest.raises(ValueError, match=r"axis=\('node', 'device'\).*is not an axis of the mesh"):
        optax_ext.init_state(transformation(), jnp.ones(3), {"node": 4})
    tx = transformation()
    state = optax_ext.init_state(tx, jnp.ones(SIZE), mesh((2, 2)))
    # The state of all workers, where each is to see its own part.
    step = jax.shard_map(
        lambda state, g: tx.update(g, state)[0],
        mesh=mesh((2, 2)),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match="has 4 rows inside the mapped function"):
        jax.jit(step)(state, jnp.ones(SIZE))


def test_the_state_of_all_workers_on_one_device_is_that_of_a_mesh():
    tx = transformation(OUTERS["ok_topk"], correction=optax_ext.momentum_correction(0.9))
    params = {"a": jnp.zeros((9, 10)), "b": jnp.zeros(11)}
    here = optax_ext.init_state(tx, params, {"node": 3, "device": 2})
    there = optax_ext.init_state(tx, params, mesh((3, 2)))
    assert jax.tree.structure(here) == jax.tree.structure(there)
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_aliases_are_the_compositions_they_are_named_after():
    for alias, selector, allreduce in (
        (optax_ext.topk_a, sc.select.topk, sc.allreduce.topk_a()),
        (
            functools.partial(optax_ext.topk_a, selector=sc.select.gaussian_k(density=DENSITY)),
            sc.select.gaussian_k,
            sc.allreduce.topk_a(),
        ),
        (optax_ext.gtopk, sc.select.topk, sc.allreduce.gtopk(density=DENSITY)),
    ):
        both = (
            alias(DENSITY, axis="workers"),
            optax_ext.sparse_allreduce(selector(density=DENSITY), allreduce, axis="workers"),
        )
        programs = [
            str(
                jax.make_jaxpr(
                    lambda g, tx=tx: tx.update(g, tx.init(g)), axis_env=[("workers", 3)]
                )(jnp.ones(SIZE))
            )
            for tx in both
        ]
        assert programs[0] == programs[1]
