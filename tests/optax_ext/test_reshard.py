"""Another number of workers: nothing of the residuals is lost."""

import math

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

PARAMS = {"a": np.zeros((20, 9), np.float32), "b": np.zeros(7, np.float32)}
SIZE = 187


def mesh(workers):
    return jax.make_mesh(
        (workers,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


CASES = {
    "topk": (sc.select.topk(density=0.1), sc.allreduce.ok_topk(density=0.1)),
    "threshold_reuse": (sc.select.threshold_reuse(density=0.1), sc.allreduce.topk_a()),
    "adtopk_threshold": (
        sc.select.adtopk_threshold(density=0.1, steps=100, warmup=1),
        sc.allreduce.gtopk(density=0.1),
    ),
}


def transformation(name, **options):
    return optax.chain(
        optax_ext.sparse_allreduce(*CASES[name], axis="w", **options),
        optax.inject_hyperparams(optax.adam)(1e-3),
    )


def stepper(tx, workers, state):
    specs = optax_ext.state_specs(state)

    def local(state, gradient):
        gradient = jax.tree.map(lambda g: g[0], gradient)
        return tx.update(gradient, state, PARAMS)

    return jax.jit(
        jax.shard_map(local, mesh=mesh(workers), in_specs=(specs, P("w")), out_specs=(P(), specs))
    )


def gradients(workers, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.standard_normal((workers, *x.shape)).astype(np.float32), PARAMS
    )


def exact_sums(state):
    residual = np.asarray(optax_ext.get_state(state).residual, np.float64)
    return np.array([math.fsum(column) for column in residual.T])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eight_to_three_to_five_to_eight_keeps_the_sum_to_the_last_bit(name):
    tx = transformation(name)
    state = optax_ext.init_state(tx, PARAMS, mesh(8))
    step = stepper(tx, 8, state)
    for i in range(3):
        _, state = step(state, gradients(8, i))
    before, rest = exact_sums(state), jax.tree.map(np.asarray, state[1])
    for workers in (3, 5, 8):
        state = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(workers)))
        assert optax_ext.get_state(state).residual.shape == (workers, SIZE)
        np.testing.assert_array_equal(exact_sums(state), before)
    jax.tree.map(np.testing.assert_array_equal, state[1], rest)
    assert int(state[0].count) == 3
    # The training goes on: one more step loses nothing either, without another trace.
    gradient = gradients(8, 9)
    sparse = optax_ext.sparse_allreduce(*CASES[name], axis="w")
    total, after = stepper(sparse, 8, state[0])(state[0], gradient)
    acc = before + np.concatenate([gradient[n].sum(0, np.float64).ravel() for n in "ab"])
    total = 8 * np.concatenate([np.ravel(total[n]) for n in "ab"])
    np.testing.assert_allclose(total + exact_sums(after), acc, atol=1e-5)
    assert int(after.count) == 4
    # Each worker selects what it was asked for: no threshold was left over.
    assert (np.asarray(after.info.selected) <= 30).all()
    assert (np.asarray(after.info.overflow) <= 19).all()
    step(state, gradient)
    assert jax_internals.programs(step) == 1


@pytest.mark.slow
def test_counts_go_on_and_thresholds_and_regions_start_anew():
    for name in CASES:
        tx = transformation(name)
        state = optax_ext.init_state(tx, PARAMS, mesh(4))
        step = stepper(tx, 4, state)
        for i in range(2):
            _, state = step(state, gradients(4, i))
        new = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(2)))[0]
        assert new.allreduce.count.tolist() == [2]
        if name == "topk":
            assert new.allreduce.boundaries.tolist() == [[0, 94, 187]]
            assert new.allreduce.crowded
        if name == "threshold_reuse":
            assert new.selector.count.tolist() == [2, 2]
            assert new.selector.threshold.tolist() == [0, 0]
        if name == "adtopk_threshold":
            assert all((layer.count == 2).all() for layer in new.selector.states)


def test_to_one_worker_it_is_rounded_once_and_from_one_every_worker_has_a_part():
    tx = optax_ext.ok_topk(0.1, axis="w")
    rng = np.random.default_rng(0)
    residual = rng.standard_normal((8, SIZE)).astype(np.float32)
    state = optax_ext.init_state(tx, PARAMS, mesh(8))._replace(residual=residual)
    before = exact_sums(state)
    one = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(1)))
    np.testing.assert_array_equal(one.residual[0], before.astype(np.float32))
    five = optax_ext.reshard(one, optax_ext.init_state(tx, PARAMS, mesh(5)))
    np.testing.assert_array_equal(exact_sums(five), exact_sums(one))
    assert (np.count_nonzero(five.residual, axis=1) >= SIZE // 5).all()
    assert five.residual.sharding.spec == P("w")


def test_sums_of_unlike_magnitudes_keep_what_fits():
    tx = optax_ext.ok_topk(0.1, axis="w")
    old, new = (optax_ext.init_state(tx, jnp.zeros(2), {"w": workers}) for workers in (4, 3))
    residual = np.float32([[1e8, 1], [1e-3, 2], [3, -3], [-1e8, 1e-9]])
    new = optax_ext.reshard(old._replace(residual=residual), new)
    expected = exact_sums(old._replace(residual=residual))
    np.testing.assert_array_equal(exact_sums(new), expected)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("node", "device"), ("device", "node")])
def test_shards_of_a_hierarchy(axes):
    outer = sc.allreduce.ok_topk(density=0.1)
    hierarchy = sc.allreduce.hierarchical(inner_axis="device", outer=outer)
    tx = optax_ext.sparse_allreduce(sc.select.topk(density=0.1), hierarchy, axis=axes)

    def fresh(nodes, devices):
        shape = (nodes, devices) if axes[0] == "node" else (devices, nodes)
        here = np.asarray(jax.devices()[: nodes * devices]).reshape(shape)
        return optax_ext.init_state(tx, PARAMS, Mesh(here, axes))

    flat = optax_ext.ok_topk(0.1, axis="w")
    rng = np.random.default_rng(0)
    state = optax_ext.init_state(flat, PARAMS, mesh(8))._replace(
        residual=rng.standard_normal((8, SIZE)).astype(np.float32)
    )
    before = exact_sums(state)
    for shape in ((4, 2), (3, 2), (2, 4)):
        state = optax_ext.reshard(state, fresh(*shape))
        gradient, _ = optax_ext.consolidate(PARAMS, state)
        got = np.concatenate([np.ravel(gradient[n]) for n in "ab"]) * state.residual.shape[0]
        np.testing.assert_allclose(got, before, rtol=1e-5, atol=1e-5)
    back = optax_ext.reshard(state, optax_ext.init_state(flat, PARAMS, mesh(4)))
    np.testing.assert_array_equal(exact_sums(back), before)


def test_what_does_not_fit_is_named():
    def fresh(tx, params=PARAMS):
        return optax_ext.init_state(tx, params, mesh(2))

    state = fresh(transformation("topk"))
    with pytest.raises(ValueError, match="different optimizers"):
        optax_ext.reshard(state, fresh(optax_ext.ok_topk(0.1, axis="w")))
    scaled = fresh(transformation("topk", local=optax.scale(0.1)))
    with pytest.raises(ValueError, match=r"residuals without a local transformation.*Give local="):
        optax_ext.reshard(state, scaled)
    with pytest.raises(ValueError, match=r"residuals behind a local transformation.*Give local="):
        optax_ext.reshard(scaled, state)
    one = optax_ext.ok_topk(0.1, axis="w")
    with pytest.raises(ValueError, match=r"updates\['b'\] has shape"):
        optax_ext.reshard(fresh(one), fresh(one, {**PARAMS, "b": jnp.zeros(6)}))


def test_consolidate_with_parts_and_with_a_mapped_axis():
    tx = optax.multi_transform(
        {
            "sparse": optax_ext.ok_topk(0.1, axis="w"),
            "other": optax_ext.topk_a(0.5, axis="w"),
            "none": optax.identity(),
        },
        {"a": "sparse", "b": "other", "c": "none"},
    )
    params = {**PARAMS, "c": jnp.ones(3)}
    state = jax.tree.map(
        lambda node: node._replace(residual=jnp.ones_like(node.residual)),
        optax_ext.init_state(tx, params, {"w": 2}),
        is_leaf=lambda node: isinstance(node, optax_ext.SparseAllreduceState),
    )
    gradient, state = optax_ext.consolidate(params, state)
    for name, value in (("a", 1), ("b", 1), ("c", 0)):
        np.testing.assert_array_equal(gradient[name], np.full(params[name].shape, value))
    again, _ = optax_ext.consolidate(params, state)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(again))
    one = optax_ext.ok_topk(0.1, axis="w")
    inside = sc.simulate(lambda g: optax_ext.consolidate(g, one.init(g))[0], axis="w", axis_size=2)
    with pytest.raises(ValueError, match="Call it outside"):
        inside(jnp.ones((2, 4)))


def test_a_number_of_workers_in_place_of_the_new_state():
    state = optax_ext.init_state(transformation("topk"), PARAMS, mesh(2))
    for wrong in (4, np.int64(4), mesh(4)):
        with pytest.raises(
            TypeError, match=r"fresh_state must be.*init_state\(tx, params, new_mesh"
        ):
            optax_ext.reshard(state, wrong)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_consolidate_where_the_sum_is_too_large_and_the_mean_is_not(dtype):
    params = jnp.zeros(3, dtype)
    state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), params, {"w": 4})
    rows = np.zeros((4, 3), np.float32)
    rows[:, 0], rows[:2, 1], rows[0, 2] = 2e38, 3e38, -1.0
    gradient, left = optax_ext.consolidate(params, state._replace(residual=rows))
    assert gradient.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64),
        rows.astype(np.float64).mean(0),
        rtol=float(jnp.finfo(dtype).eps),
    )
    assert not np.asarray(left.residual).any()
