"""Resharding what a step leaves besides plain residuals: velocities, shards, NaN, huge sums."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.test_reshard import PARAMS, SIZE, exact_sums, gradients, mesh, stepper

CORRECTION = optax_ext.momentum_correction(0.9, masking=False)


def column_sums(rows):
    return np.array([math.fsum(column) for column in np.asarray(rows, np.float64).T])


@pytest.mark.slow
def test_velocities_keep_their_sum_from_eight_to_three_to_five_to_eight():
    tx = optax_ext.topk_a(0.1, axis="w", correction=CORRECTION)
    state = optax_ext.init_state(tx, PARAMS, mesh(8))
    step = stepper(tx, 8, state)
    for i in range(3):
        _, state = step(state, gradients(8, i))
    residual, velocity = exact_sums(state), column_sums(state.velocity)
    assert velocity.all()
    for workers in (3, 5, 8):
        state = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(workers)))
        assert state.velocity.shape == (workers, SIZE)
        np.testing.assert_array_equal(column_sums(state.velocity), velocity)
        np.testing.assert_array_equal(exact_sums(state), residual)
    # The next step accumulates what it would have: m times the velocity, and the gradient.
    gradient = gradients(8, 9)
    total, after = step(state, gradient)
    given = np.concatenate([gradient[n].sum(0, np.float64).ravel() for n in "ab"])
    total = 8 * np.concatenate([np.ravel(total[n]) for n in "ab"])
    expected = residual + 0.9 * velocity + given
    np.testing.assert_allclose(total + exact_sums(after), expected, rtol=1e-5, atol=2e-5)


def test_a_velocity_that_only_one_state_has_starts_or_ends():
    plain = optax_ext.init_state(optax_ext.topk_a(0.1, axis="w"), PARAMS, {"w": 3})
    corrected = optax_ext.topk_a(0.1, axis="w", correction=CORRECTION)
    corrected = optax_ext.init_state(corrected, PARAMS, {"w": 2})
    assert not np.asarray(optax_ext.reshard(plain, corrected).velocity).any()
    moved = corrected._replace(velocity=jnp.ones((2, SIZE)), residual=jnp.ones((2, SIZE)))
    moved = optax_ext.reshard(moved, plain)
    assert moved.velocity == ()
    np.testing.assert_array_equal(exact_sums(moved), np.full(SIZE, 2.0))


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_a_residual_that_is_not_finite_stays_at_its_index_and_on_one_worker(workers):
    """Fewer workers: NaN and infinities are added up as in any sum. More: they do not move."""
    tx = optax_ext.topk_a(0.1, axis="w")
    old = optax_ext.init_state(tx, jnp.zeros(6), {"w": 4})
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    rows[1, 0], rows[2, 1], rows[0, 2] = np.nan, np.inf, -np.inf
    rows[:2, 3] = np.inf, -np.inf
    new = optax_ext.init_state(tx, jnp.zeros(6), {"w": workers})
    new = np.asarray(optax_ext.reshard(old._replace(residual=rows), new).residual)
    bad = (~np.isfinite(new)).sum(axis=0)
    assert bad.tolist() == [1, 1, 1, 1 if workers < 4 else 2, 0, 0]
    with np.errstate(invalid="ignore"):
        sums = new.sum(axis=0)
    np.testing.assert_array_equal(sums[:3], [np.nan, np.inf, -np.inf])
    assert np.isnan(sums[3])
    np.testing.assert_array_equal(sums[4:], rows[:, 4:].sum(axis=0))


def test_a_sum_that_is_too_large_for_one_worker_goes_to_several():
    largest = np.finfo(np.float32).max
    tx = optax_ext.topk_a(0.1, axis="w")
    old = optax_ext.init_state(tx, jnp.zeros(3), {"w": 8})
    rows = np.zeros((8, 3), np.float32)
    rows[:3, 0], rows[:3, 1], rows[:, 2] = largest, -largest, largest
    three, one = (
        optax_ext.reshard(
            old._replace(residual=rows),
            optax_ext.init_state(tx, jnp.zeros(3), {"w": workers}),
        ).residual
        for workers in (3, 1)
    )
    np.testing.assert_array_equal(
        column_sums(three[:, :2]), [3 * float(largest), -3 * float(largest)]
    )
    # What no float32 holds is infinite, and not a part of it.
    assert np.isinf(np.asarray(three)[:, 2].sum(dtype=np.float64))
    np.testing.assert_array_equal(one, [[np.inf, -np.inf, np.inf]])


AXES = ("node", "device")


def stateless():
    honest = sc.allreduce.topk_a()

    def reduce(coo, state, *, axis):
        total, undelivered, _, info = honest.reduce(coo, honest.init(coo.size, 1), axis=axis)
        return total, undelivered, state, info

    return sc.SparseAllreduce(lambda size, axis_size: (), reduce, spec=sc.Spec.of("stateless"))


def hierarchy(nodes, devices, outer, params=PARAMS, **options):
    """The transformation and its state on a mesh of nodes."""
    exchange = sc.allreduce.hierarchical(inner_axis="device", outer=outer)
    tx = optax_ext.sparse_allreduce(sc.select.topk(density=0.1), exchange, axis=AXES, **options)
    here = jax.make_mesh(
        (nodes, devices),
        AXES,
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: nodes * devices],
    )
    return tx, optax_ext.init_state(tx, params, here)


def node_sums(rows, devices):
    """The exact sum over the nodes, the shards of a node side by side."""
    rows = np.asarray(rows, np.float64)
    return column_sums(rows.reshape(-1, devices * rows.shape[1])[:, :SIZE])


@pytest.mark.parametrize("outer", [sc.allreduce.topk_a(), stateless()], ids=["topk_a", "stateless"])
def test_nodes_keep_the_sums_of_residual_and_velocity(outer):
    rng = np.random.default_rng(0)
    _, state = hierarchy(4, 2, outer, correction=CORRECTION)
    rows = rng.standard_normal((2, *state.residual.shape)).astype(np.float32)
    rows[:, 1::2, -1] = 0  # The padding of the last shard: 187 entries in two shards of 94.
    state = state._replace(residual=jnp.asarray(rows[0]), velocity=jnp.asarray(rows[1]))
    sums = [node_sums(part, 2) for part in rows]
    for nodes, devices in ((3, 2), (1, 5), (2, 4), (4, 2)):
        _, fresh = hierarchy(nodes, devices, outer, correction=CORRECTION)
        state = optax_ext.reshard(state, fresh)
        assert state.residual.sharding == fresh.residual.sharding
        if nodes > 1:
            np.testing.assert_array_equal(node_sums(state.residual, devices), sums[0])
            np.testing.assert_array_equal(node_sums(state.velocity, devices), sums[1])
        else:  # One node is one summand: rounded once.
            sums = [np.float64(np.float32(part)) for part in sums]
            np.testing.assert_array_equal(node_sums(state.residual, devices), sums[0])
    metadata = optax_ext.checkpoint_metadata(state)
    assert metadata["sparse"][""]["workers_in_a_node"] == 2
    optax_ext.check_metadata(metadata, state)
    _, other = hierarchy(2, 4, outer, correction=CORRECTION)
    with pytest.raises(ValueError, match="workers_in_a_node: 2 in the checkpoint, 4 here"):
        optax_ext.check_metadata(metadata, other)


def test_shards_of_padding_only_are_seen_by_their_place():
    """Three entries in shards of one, for nodes of four: those of eight would look the same."""
    params = jnp.zeros(3)
    _, state = hierarchy(2, 4, stateless(), params)
    assert state.residual.shape == (8, 1)
    rows = np.arange(1.0, 9, dtype=np.float32).reshape(2, 4)
    rows[:, 3:] = 0
    placed = jax.device_put(rows.reshape(8, 1), state.residual.sharding)
    gradient, _ = optax_ext.consolidate(params, state._replace(residual=placed))
    np.testing.assert_array_equal(gradient, rows[:, :3].sum(0) / 8)
    assert optax_ext.checkpoint_metadata(state)["sparse"][""]["workers_in_a_node"] == 4


def test_shards_that_do_not_say_how_many_they_are():
    params = jnp.zeros(5)
    _, state = hierarchy(3, 1, stateless(), params)
    host = SingleDeviceSharding(jax.devices()[0])
    # Twelve rows of two are four nodes of three or three of four.
    lost = state._replace(residual=jax.device_put(jnp.zeros((12, 2)), host))
    with pytest.raises(ValueError, match=r"12 rows of 2 for 5 entries.*\[3, 4\] workers"):
        optax_ext.reshard(lost, state)
    with pytest.raises(ValueError, match=r"\[3, 4\] workers.*axis 'device'"):
        optax_ext.checkpoint_metadata(lost)
    # A replicated array on a mesh with that axis says nothing either.
    everywhere = NamedSharding(state.residual.sharding.mesh, P())
    with pytest.raises(ValueError, match=r"\[3, 4\] workers"):
        optax_ext.checkpoint_metadata(
            lost._replace(residual=jax.device_put(jnp.zeros((12, 2)), everywhere))
        )


@pytest.mark.slow
def test_the_state_of_a_local_transformation_goes_on():
    """Counts and averages are those of an old worker, and no sums as the residuals are."""
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.1})
    tx = optax_ext.topk_a(0.1, axis="w", local=optax.scale_by_schedule(schedule))
    state = optax_ext.init_state(tx, PARAMS, mesh(4))
    step = stepper(tx, 4, state)
    for i in range(3):
        _, state = step(state, gradients(4, i))
    assert state.local.count.tolist() == [3] * 4
    for workers in (2, 5):
        moved = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(workers)))
        assert moved.local.count.tolist() == [3] * workers
        assert moved.local.count.sharding.spec == P("w")
        np.testing.assert_array_equal(exact_sums(moved), exact_sums(state))
