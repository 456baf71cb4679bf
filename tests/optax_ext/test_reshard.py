"""Another number of workers loses nothing of residuals and velocities, and keeps the rest."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import helpers
from tests.optax_ext.helpers import NODES, flat, mapped, mesh, normal, over_nodes, refused, same

PARAMS = {"a": np.zeros((20, 9), np.float32), "b": np.zeros(7, np.float32)}
SIZE = 187
CORRECTION = optax_ext.momentum_correction(0.9, masking=False)
TOPK_A = sc.allreduce.topk_a()


def selecting(selector=None, allreduce=TOPK_A, axis="w", **options):
    selector = sc.select.topk(density=0.1) if selector is None else selector
    return optax_ext.sparse_allreduce(selector, allreduce, axis=axis, **options)


CASES = {
    "topk": selecting(allreduce=sc.allreduce.ok_topk(density=0.1)),
    "threshold_reuse": selecting(sc.select.threshold_reuse(density=0.1)),
    "adtopk_threshold": selecting(
        sc.select.published.adtopk_threshold(density=0.1, steps=100, warmup=1),
        sc.allreduce.published.gtopk(density=0.1),
    ),
    "row_topk": selecting(
        sc.select.published.adtopk(density=0.1), sc.allreduce.row_topk(density=0.1)
    ),
    "velocity": selecting(correction=CORRECTION),
    # Counts and averages come from one old worker; they are not summed as the residuals are.
    "local": selecting(local=optax.scale_by_schedule(lambda count: 0.5)),
}


def gradients(workers, seed):
    return {key: normal((workers, *x.shape), seed) for key, x in PARAMS.items()}


def fresh(tx, workers, params=PARAMS):
    return optax_ext.init_state(tx, params, mesh(workers, "w"))


def after_steps(tx, workers, steps):
    state = fresh(tx, workers)
    step = mapped(tx, mesh(workers, "w"), state)
    for i in range(steps):
        _, state = step(gradients(workers, i), state)
    return state, step


def column_sums(rows):
    """The exact sums over the rows, rounded once."""
    return np.array([math.fsum(column) for column in np.asarray(rows, np.float64).T])


def sums(state):
    """The exact sums of residuals and velocities, rounded once."""
    rows = [state.residual, *([state.velocity] if np.size(state.velocity) else [])]
    return np.stack([column_sums(x) for x in rows])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eight_to_three_to_five_to_eight_keeps_the_sums_to_the_last_bit(name):
    tx = CASES[name]
    state, step = after_steps(tx, 8, 3)
    before, local, adam = sums(state), state.local, optax.adam(1e-3).init(PARAMS)
    for workers in (3, 5, 8):
        # The rest of a chain is unchanged.
        chain = optax.chain(tx, optax.adam(1e-3))
        state, rest = optax_ext.reshard((state, adam), fresh(chain, workers))
        same(rest, adam)
        assert state.residual.shape == (workers, SIZE)
        np.testing.assert_array_equal(sums(state), before)
    assert int(state.count) == 3
    if name == "local":
        assert local.count.tolist() == state.local.count.tolist() == [3] * 8
        assert state.local.count.sharding.spec == P("w")
        return
    # The training continues: one more step loses nothing either.
    gradient = gradients(8, 9)
    total, after = step(gradient, state)
    acc = before[0] + flat(gradient, (8,)).sum(0)
    if name == "velocity":
        assert before[1].all()
        acc += 0.9 * before[1]
    np.testing.assert_allclose(8 * flat(total) + sums(after)[0], acc, atol=1e-5)
    assert int(after.count) == 4
    # Each worker selects its k entries: no old threshold is left.
    assert (np.asarray(after.info.selected) <= 30).all()
    assert (np.asarray(after.info.overflow) <= 19).all()


@pytest.mark.slow
def test_counts_go_on_and_thresholds_and_regions_start_anew():
    moved = {
        name: optax_ext.reshard(after_steps(CASES[name], 4, 2)[0], fresh(CASES[name], 2))
        for name in ("topk", "threshold_reuse", "adtopk_threshold")
    }
    exchange, reused = moved["topk"].allreduce, moved["threshold_reuse"].selector
    assert exchange.count.tolist() == [2]
    assert exchange.boundaries.tolist() == [[0, 94, 187]]
    assert exchange.overflowed
    assert reused.count.tolist() == [2, 2]
    assert reused.threshold.tolist() == [0, 0]
    assert all((x.count == 2).all() for x in moved["adtopk_threshold"].selector.states)


@pytest.mark.parametrize("make", [optax_ext.acp_sgd, helpers.slow(optax_ext.powersgd)])
def test_factors_of_low_rank_go_on_and_those_of_another_rank_start_anew(make):
    state, _ = after_steps(make(2, axis="w"), 4, 2)
    for workers in (2, 8):
        moved = optax_ext.reshard(state, fresh(make(2, axis="w"), workers))
        assert moved.residual.shape == (workers, 180)
        np.testing.assert_array_equal(sums(moved), sums(state))
        assert int(moved.count) == 2
        same(moved.allreduce, state.allreduce)
    anew = fresh(make(3, axis="w"), 3)
    same(optax_ext.reshard(state, anew).allreduce, anew.allreduce)


def test_units_of_quantized_go_on():
    state, _ = after_steps(optax_ext.quantized(axis="w"), 4, 2)
    assert np.asarray(state.allreduce.mean_square).any()
    moved = optax_ext.reshard(state, fresh(optax_ext.quantized(axis="w"), 3))
    np.testing.assert_array_equal(sums(moved), sums(state))
    same(moved.allreduce, state.allreduce)


def test_to_one_worker_it_is_rounded_once_and_from_one_every_worker_has_a_part():
    tx = CASES["topk"]
    state = fresh(tx, 8)._replace(residual=normal((8, SIZE)))
    one = optax_ext.reshard(state, fresh(tx, 1))
    np.testing.assert_array_equal(one.residual, sums(state).astype(np.float32))
    five = optax_ext.reshard(one, fresh(tx, 5))
    np.testing.assert_array_equal(sums(five), sums(one))
    assert (np.count_nonzero(five.residual, axis=1) >= SIZE // 5).all()
    assert five.residual.sharding.spec == P("w")


def resharded(rows, workers, **options):
    """Residuals of other workers, as rows."""
    tx, like = selecting(**options), jnp.zeros(rows.shape[1])
    old, new = (optax_ext.init_state(tx, like, {"w": n}) for n in (len(rows), workers))
    return optax_ext.reshard(old._replace(residual=rows), new).residual


def test_sums_of_unlike_magnitudes_keep_what_fits_and_bfloat16_stays():
    rows = np.float32([[1e8, 1], [1e-3, 2], [3, -3], [-1e8, 1e-9]])
    np.testing.assert_array_equal(column_sums(resharded(rows, 3)), column_sums(rows))
    bfloat16 = optax_ext.residual(jnp.bfloat16)
    rows = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (2, 16)), jnp.bfloat16)
    more = resharded(rows, 5, residual=bfloat16)
    for moved in (more, resharded(more, 3, residual=bfloat16)):
        assert moved.dtype == jnp.bfloat16
        np.testing.assert_array_equal(column_sums(moved), column_sums(rows))


def test_a_velocity_that_only_one_state_has_starts_or_ends():
    plain, corrected = fresh(selecting(), 3), fresh(CASES["velocity"], 2)
    assert not np.asarray(optax_ext.reshard(plain, corrected).velocity).any()
    moved = corrected._replace(velocity=jnp.ones((2, SIZE)), residual=jnp.ones((2, SIZE)))
    moved = optax_ext.reshard(moved, plain)
    assert moved.velocity == ()
    np.testing.assert_array_equal(sums(moved), np.full((1, SIZE), 2.0))


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_a_residual_that_is_not_finite_stays_at_its_index_and_on_one_worker(workers):
    """Fewer workers: NaN and infinities are added up as in any sum. More: they do not move."""
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    rows[1, 0], rows[2, 1], rows[0, 2] = np.nan, np.inf, -np.inf
    rows[:2, 3] = np.inf, -np.inf
    new = np.asarray(resharded(rows, workers))
    bad = (~np.isfinite(new)).sum(axis=0)
    assert bad.tolist() == [1, 1, 1, 1 if workers < 4 else 2, 0, 0]
    with np.errstate(invalid="ignore"):
        total = new.sum(axis=0)
    np.testing.assert_array_equal(total[:4], [np.nan, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(total[4:], rows[:, 4:].sum(axis=0))


def test_a_sum_that_is_too_large_for_one_worker_goes_to_several():
    largest = np.finfo(np.float32).max
    rows = np.zeros((8, 3), np.float32)
    rows[:3, 0], rows[:3, 1], rows[:, 2] = largest, -largest, largest
    three = np.asarray(resharded(rows, 3))
    expected = [3 * float(largest), -3 * float(largest)]
    np.testing.assert_array_equal(column_sums(three[:, :2]), expected)
    # A sum beyond the range of float32 becomes infinite, not a part of it.
    assert np.isinf(three[:, 2].sum(dtype=np.float64))
    np.testing.assert_array_equal(resharded(rows, 1), [[np.inf, -np.inf, np.inf]])


def stateless():
    def reduce(coo, state, *, axis):
        total, undelivered, _, info = TOPK_A.reduce(coo, TOPK_A.init(coo.size, 1), axis=axis)
        return total, undelivered, state, info

    return sc.SparseAllreduce(lambda size, axis_size: (), reduce, spec=sc.Spec.of("stateless"))


def of_nodes(nodes, devices, outer=TOPK_A, params=PARAMS, axes=NODES, **options):
    """The state on a mesh of nodes."""
    shape = (nodes, devices) if axes == NODES else (devices, nodes)
    return optax_ext.init_state(over_nodes(outer, axis=axes, **options), params, mesh(shape, axes))


def node_sums(rows, devices):
    """The exact sum over the nodes, the shards of a node side by side."""
    rows = np.asarray(rows, np.float64)
    return column_sums(rows.reshape(-1, devices * rows.shape[1])[:, :SIZE])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [NODES, NODES[::-1]])
def test_between_flat_workers_and_nodes(axes):
    outer = sc.allreduce.ok_topk(density=0.1)
    state = fresh(CASES["topk"], 8)._replace(residual=normal((8, SIZE)))
    before = sums(state)
    for shape in ((4, 2), (3, 2), (2, 4)):
        state = optax_ext.reshard(state, of_nodes(*shape, outer, axes=axes))
        gradient, _ = optax_ext.consolidate(PARAMS, state)
        got = flat(gradient) * state.residual.shape[0]
        np.testing.assert_allclose(got, before[0], rtol=1e-5, atol=1e-5)
    back = optax_ext.reshard(state, fresh(CASES["topk"], 4))
    np.testing.assert_array_equal(sums(back), before)


@pytest.mark.parametrize("outer", [TOPK_A, stateless()], ids=["topk_a", "stateless"])
def test_nodes_keep_the_sums_of_residual_and_velocity(outer):
    state = of_nodes(4, 2, outer, correction=CORRECTION)
    rows = normal((2, *state.residual.shape))
    rows[:, 1::2, -1] = 0  # The padding of the last shard: 187 entries in two shards of 94.
    state = state._replace(residual=jnp.asarray(rows[0]), velocity=jnp.asarray(rows[1]))
    expected = [node_sums(part, 2) for part in rows]
    for nodes, devices in ((3, 2), (1, 5), (2, 4), (4, 2)):
        like = of_nodes(nodes, devices, outer, correction=CORRECTION)
        state = optax_ext.reshard(state, like)
        assert state.residual.sharding == like.residual.sharding
        if nodes == 1:  # One node is one summand: rounded once.
            expected = [np.float64(np.float32(part)) for part in expected]
        np.testing.assert_array_equal(node_sums(state.residual, devices), expected[0])
        np.testing.assert_array_equal(node_sums(state.velocity, devices), expected[1])
    metadata = optax_ext.checkpoint_metadata(state)
    assert metadata["sparse"][""]["workers_in_a_node"] == 2
    optax_ext.check_metadata(metadata, state)
    other = of_nodes(2, 4, outer, correction=CORRECTION)
    message = "workers_in_a_node: 2 in the checkpoint, 4 here"
    refused(message, optax_ext.check_metadata, metadata, other)


def test_how_many_shards_there_are_is_seen_by_their_place():
    """Three entries in shards of one, for nodes of four: nodes of eight would look the same."""
    params = jnp.zeros(3)
    state = of_nodes(2, 4, stateless(), params)
    assert state.residual.shape == (8, 1)
    rows = np.arange(1.0, 9, dtype=np.float32).reshape(2, 4)
    rows[:, 3:] = 0
    placed = jax.device_put(rows.reshape(8, 1), state.residual.sharding)
    gradient, _ = optax_ext.consolidate(params, state._replace(residual=placed))
    np.testing.assert_array_equal(gradient, rows[:, :3].sum(0) / 8)
    assert optax_ext.checkpoint_metadata(state)["sparse"][""]["workers_in_a_node"] == 4
    state = of_nodes(3, 1, stateless(), jnp.zeros(5))
    # A replicated array on a mesh with that axis says nothing either.
    everywhere = NamedSharding(state.residual.sharding.mesh, P())
    for place in (SingleDeviceSharding(jax.devices()[0]), everywhere):
        # Twelve rows of two are four nodes of three or three of four.
        lost = state._replace(residual=jax.device_put(jnp.zeros((12, 2)), place))
        message = r"12 rows of 2 for 5 entries.*\[3, 4\] workers"
        refused(message, optax_ext.reshard, lost, state)
        refused(r"\[3, 4\] workers.*axis 'device'", optax_ext.checkpoint_metadata, lost)


def test_random_keys_of_a_type_of_their_own_move_as_other_arrays_do():
    keyed = selecting(local=optax.add_noise(0.1, 0.5, jax.random.key(3)))
    tx = optax.chain(keyed, optax.noisy_sgd(0.1, key=jax.random.key(4)))
    old = fresh(tx, 2)
    assert "key<fry>[]" in str(optax_ext.checkpoint_metadata(old))
    made = optax_ext.reshard(old, fresh(tx, 3))
    for before, after, shape in (
        (old[0].local.rng_key, made[0].local.rng_key, (3,)),
        (old[1][0].rng_key, made[1][0].rng_key, ()),
    ):
        assert after.shape == shape
        assert after.dtype == before.dtype
        data = np.unique(jax.random.key_data(after).reshape(-1, 2), axis=0)
        np.testing.assert_array_equal(data, jax.random.key_data(before).reshape(-1, 2)[:1])


def test_what_does_not_fit_is_named():
    tx, place = CASES["topk"], r"fresh_state must be.*init_state\(tx, params, new_mesh"
    state, scaled = fresh(tx, 2), fresh(selecting(local=optax.scale(0.1)), 2)
    for old, new, error, message in (
        (
            state,
            fresh(optax.chain(tx, optax.adam(0.1)), 2),
            ValueError,
            r"different optimizers: only opt_state has a single array and only fresh_state has \[",
        ),
        (state, scaled, ValueError, r"residuals without a local transformation.*Give local="),
        (scaled, state, ValueError, r"residuals with a local transformation.*Give local="),
        (state, fresh(tx, 2, {**PARAMS, "b": jnp.zeros(6)}), ValueError, r"\['b'\] has shape"),
        (
            state,
            fresh(tx, 2, {**PARAMS, "new": PARAMS["b"]}),
            ValueError,
            r"new.*is not there in opt",
        ),
        (
            fresh(tx, 2, {**PARAMS, "old": PARAMS["b"]}),
            state,
            ValueError,
            r"old.*not there in fresh",
        ),
        (
            fresh(optax.chain(tx, optax.adam(0.1)), 2),
            fresh(optax.chain(tx, optax.adam(0.1)), 3, {**PARAMS, "new": PARAMS["b"]}),
            ValueError,
            r"params\['new'\] is not there in opt",
        ),
        (state, np.int64(4), TypeError, place),
        (state, mesh(4, "w"), TypeError, place),
    ):
        refused(message, optax_ext.reshard, old, new, error=error)


@pytest.mark.filterwarnings("ignore:states of fresh_state begin again")
def test_residuals_of_complete_optimizers_have_one_sign():
    """They are steps of the parameters in all of them, so that one may follow another."""
    params, gradients = {"w": jnp.ones(8)}, {"w": jnp.linspace(-1.0, 2.0, 8)}
    makers = (optax_ext.ok_topk_sgd, optax_ext.sparse_sgd, optax_ext.sparse_adamw)
    of_each = [make(0.1, density=0.125, axis="w") for make in makers]
    for tx in of_each:
        step = sc.simulate(lambda g, s, tx=tx: tx.update(g, s, params)[1], axis="w", axis_size=2)
        state = optax_ext.init_state(tx, params, {"w": 2})
        lead = jax.tree.map(lambda x: jnp.stack([x, x]), gradients)
        alone = jax.vmap(lambda _, tx=tx: tx.init(params), axis_name="w")(jnp.zeros(2))
        waits = np.asarray(step(lead, alone).residual).reshape(2, -1)
        assert waits.any()
        assert (waits * np.asarray(gradients["w"]) <= 0).all()
        for other in of_each:
            optax_ext.reshard(state, optax_ext.init_state(other, params, {"w": 3}))
    bare = optax_ext.ok_topk(0.125, axis="w", local=optax.scale(0.1))
    refused(
        "steps of the parameters, and those of fresh_state are what an optimizer",
        optax_ext.reshard,
        optax_ext.init_state(of_each[0], params, {"w": 2}),
        optax_ext.init_state(bare, params, {"w": 2}),
    )
