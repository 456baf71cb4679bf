"""Rounds of an inner and an outer optimizer: DiLoCo, Streaming DiLoCo, SparseLoCo."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import shards
from tests.optax_ext.helpers import (
    PARAMS,
    batch_of,
    flat,
    loss_fn,
    mesh,
    normal,
    refused,
    run,
    same,
    slow,
    train,
)

SIZE, WORKERS = 40, 3
MEAN = optax.chain(optax_ext.dense(axis="w"), optax.sgd(1.0))
rounds = functools.partial(optax_ext.local_steps, optax.sgd(0.1), MEAN)


def of_torchft(delay, mixing, steps=16):
    """Two layers of one parameter with gradient 2: worker 0's parameters and the common ones."""
    outer = optax.chain(optax_ext.dense(axis="w"), optax.sgd(2.0))
    tx = optax_ext.local_steps(
        *(optax.sgd(1.0), outer), every=6, fragments=2, delay=delay, mixing=mixing
    )
    found = run(
        tx, {"0": np.full((steps, 2, 1), 2.0, "f4"), "1": np.full((steps, 2, 1), 2.0, "f4")}
    )
    common = {name: 1 + np.cumsum(u[:, 0, 0]) for name, u in found.updates.items()}
    own = {name: common[name] + found.states.moved[name][:, 0, 0, 0] for name in common}
    return [np.concatenate([[1], each[name]]).tolist() for each in (own, common) for name in "01"]


def test_fragments_in_turn_have_the_numbers_of_torchft():
    """The numbers are from test_fixtures/torchft.diloco_regression_test of torchft."""
    first, second, *_ = of_torchft(0, 0.0)
    assert first[:10] == [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]
    assert first[14:16] == [-45, -59]
    assert second[5:8] == [-9, -23, -25]
    assert second[11:15] == [-33, -47, -49, -51]


@pytest.mark.parametrize(
    ("delay", "mixing", "first", "second"),
    [
        (0, 0.5, (-8, -24.5, -40.25), (-17, -32)),
        (1, 0.0, (-7, -27, -47), (-19, -39)),
        (1, 0.5, (-6, -21.5, -35.75), (-15, -29)),
    ],
)
def test_delays_and_mixing_have_the_numbers_of_torchft(delay, mixing, first, second):
    own = of_torchft(delay, mixing)[:2]
    assert tuple(own[0][step] for step in (3, 9, 15)) == first
    assert tuple(own[1][step] for step in (6, 12)) == second


def test_mixing_of_one_lets_workers_go_on_where_they_are():
    own, _, common, _ = of_torchft(0, 1.0)
    assert own[:10] == [1 - 2 * step for step in range(10)]
    assert (common[3], common[9]) == (-11, -23)


def test_averaged_workers_are_sparse_sgd_in_rounds_that_sends_all():
    def distance(params, target):
        return 0.5 * jnp.sum((params - target[0]) ** 2)

    given, params = normal((7, 4, SIZE)), normal(SIZE, 1)
    whole = optax_ext.sparse_sgd(
        0.1, density=1.0, every=3, axis="data", allreduce=sc.allreduce.dense()
    )
    outer = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    found, expected = (
        train(tx, distance, params, given, mesh())
        for tx in (optax_ext.local_steps(optax.sgd(0.1), outer, every=3), whole)
    )
    for mine, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(mine[0], other[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mine[2], other[2], rtol=1e-5)
        gone = mine[1].moved
        np.testing.assert_allclose(gone, other[1].residual, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fragments", [1, 2])
def test_local_steps_have_the_words_of_one_exchange_in_a_round(fragments):
    tx = optax_ext.published.streaming_diloco(
        optax.adamw(0.1), axis="data", every=4, fragments=fragments, delay=1
    )
    state = optax_ext.init_state(tx, PARAMS, mesh())
    step = optax_ext.make_train_step(loss_fn, tx, mesh())
    traffic = sc.traffic.of_traced(step.trace(PARAMS, state, batch_of()))
    assert traffic.words == pytest.approx(2 * 28 * 3 / 4 / 4)
    assert all(row.weight == 1 / 4 for row in traffic.collectives)


def test_local_steps_info_is_that_of_the_last_step():
    tx = optax_ext.local_steps(optax.sgd(0.1), MEAN, every=3)
    info = optax_ext.get_info(run(tx, normal((4, WORKERS, SIZE))).states)
    assert info.words[:, 0].tolist() == [0, 0, pytest.approx(2 * SIZE * 2 / 3), 0]
    assert info.delivered[:, 0].tolist() == [0, 0, SIZE, 0]


@pytest.mark.slow
def test_local_steps_apply_a_share_of_what_an_exchange_leaves_at_home():
    """The moves of this round are applied in full, and 1/P of the residual."""
    given = normal((2, WORKERS, SIZE))
    tx = optax_ext.local_steps(optax.sgd(1.0), optax_ext.sparse_sgd(1.0, axis="w"), every=2)

    def train(given):
        state, zeros = tx.init(jnp.zeros(SIZE)), jnp.zeros(SIZE)
        for _ in range(3):
            _, state = tx.update(given[0], state)
        return optax_ext.ahead(zeros, state), state.moved[0], optax_ext.get_state(state).residual[0]

    ahead, moved, residual = sc.simulate(train, axis="w", axis_size=WORKERS)(given.swapaxes(0, 1))
    assert residual.any()
    assert moved.any()
    np.testing.assert_allclose(ahead, moved + residual / WORKERS, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.one_in(2)
def test_local_steps_lose_nothing_between_rounds_and_in_what_is_not_sent(dtype):
    """The common parameters, the residuals and the workers' moves add up to all local steps."""
    given = normal((8, WORKERS, SIZE)).astype(dtype)
    tx = optax_ext.published.sparse_loco(optax.sgd(1.0), density=0.1, axis="w", every=3, decay=1.0)
    found = run(tx, given)
    sparse = optax_ext.get_state(found.states)
    applied = found.updates[:, 0].astype(np.float64).cumsum(0)
    # Exchanged gradients are subtracted, and moves are added.
    kept = found.states.moved[..., 0, :] - sparse.residual[..., 0, :].astype(np.float64)
    total = WORKERS * applied + kept.sum(1)
    np.testing.assert_allclose(total, -given.astype(np.float64).sum(1).cumsum(0), atol=2e-5)
    assert sparse.residual[2].any()


def test_local_steps_that_are_not_finite_are_left_out_by_their_worker():
    given = normal((4, WORKERS, SIZE))
    given[1, 1, 7], given[3, 2, 0] = np.nan, np.inf
    tx = optax_ext.local_steps(optax.adam(0.1), MEAN, every=2)
    found = run(tx, given)
    assert found.states.missed[-1].ravel().tolist() == [0, 1, 1]
    counts = found.states.inner[0].count[-1].ravel().tolist()
    assert counts == [4, 3, 3]
    assert np.isfinite(found.updates).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.states.inner))
    assert found.updates[1].any()


def test_local_steps_go_on_from_a_checkpoint_and_with_other_workers():
    tx = optax_ext.published.diloco(optax.adam(0.1), axis="data", every=3, momentum=0.5)
    batches = [batch_of(seed=seed) for seed in range(5)]
    whole = train(tx, loss_fn, PARAMS, batches, mesh())[-1]
    params, state, loss = train(tx, loss_fn, PARAMS, batches[:2], mesh())[-1]
    assert loss.shape == ()
    step = optax_ext.make_train_step(loss_fn, tx, mesh(), donate=False)
    saved = jax.device_get((params, state))
    for batch in batches[2:]:
        saved = step(*saved[:2], batch)
    same(saved[:2], whole[:2])
    state = state._replace(missed=jnp.array([1, 0, 2, 0], jnp.int32))
    fewer = optax_ext.reshard(state, optax_ext.init_state(tx, params, mesh(2)))
    assert fewer.missed.tolist() == [3, 0]
    assert int(fewer.count) == 2
    means = [flat(x.moved, (len(x.missed),)).mean(0) for x in (state, fewer)]
    np.testing.assert_allclose(*means, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(fewer.inner[0].mu["w"], state.inner[0].mu["w"][:2])
    again = optax_ext.make_train_step(loss_fn, tx, mesh(2))
    new, fewer, _ = again(jax.device_get(params), fewer, batches[2])
    assert (np.asarray(new["w"]) != np.asarray(params["w"])).any()
    assert not flat(fewer.moved, (2,)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner", [optax.adamw(0.03), optax.contrib.muon(0.03)], ids=["adamw", "muon"]
)
def test_local_steps_train_with_sharded_parameters(inner):
    on, specs = mesh((2, 2), ("data", "model")), {"w": P(None, "model"), "b": P("model")}
    tx = optax_ext.published.diloco(inner, axis="data", every=4, outer_rate=1.0, momentum=0.0)
    placed = shards.placed(PARAMS, on, specs)
    found = train(tx, loss_fn, placed, [batch_of()] * 40, on)
    whole = train(tx, loss_fn, PARAMS, [batch_of()] * 40, mesh(2))
    losses = [[float(loss.mean()) for _, _, loss in each[1:]] for each in (found, whole)]
    assert losses[0][-1] < 0.5 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)
    params, state, _ = found[-1]
    assert params["w"].sharding.spec == specs["w"]
    assert state.moved["w"].sharding.spec == P("data", None, "model")
    shards.same_on_devices((params, state))


def test_joined_leaves_are_one_sum_with_the_same_result():
    ended = []
    for buckets, sums in ((None, len(PARAMS)), (1, 1)):
        tx = optax_ext.published.diloco(
            optax.sgd(0.1), axis="data", every=2, momentum=0.0, buckets=buckets
        )
        state = optax_ext.init_state(tx, PARAMS, mesh())
        step = optax_ext.make_train_step(loss_fn, tx, mesh())
        report = sc.traffic.of_traced(step.trace(PARAMS, state, batch_of()))
        # Apart from sums of single numbers, such as the loss.
        assert sum(row.words > 2 for row in report.collectives) == sums
        ended.append(train(tx, loss_fn, PARAMS, [batch_of()] * 2, mesh())[-1][0])
    same(*ended)


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, *map(slow, ({"fragments": 2}, {"mixing": 0.5}))], ids=str)
def test_flush_moves_to_the_mean_of_the_workers_models_and_loses_nothing(dtype, options):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    outer = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    tx = optax_ext.local_steps(optax.sgd(0.1), outer, every=2, **options)
    found = train(tx, loss_fn, params, [batch_of()] * 2, mesh())
    for steps, (params, state, *_) in enumerate(found):
        before = jax.tree.map(lambda x: np.asarray(x, np.float64), state.moved)
        flushed, left = optax_ext.flush(params, state)
        for name, moved in before.items():
            old, new = (np.asarray(x[name], np.float64) for x in (params, flushed))
            rest = np.asarray(left.moved[name], np.float64)
            given = len(moved) * (new - old) + rest.sum(0)
            np.testing.assert_allclose(given, moved.sum(0), atol=1e-6)
            np.testing.assert_array_equal(rest, rest[:1] + np.zeros_like(rest))
            assert dtype == jnp.bfloat16 or not rest.any()
        if steps == 1 or (options and steps):
            message = "in the middle of a round.*optax_ext.flush"
            refused(message, optax_ext.consolidate, params, state)
        optax_ext.consolidate(flushed, left)
    if not options:
        # A whole round: only what 16 bits did not take is left.
        optax_ext.consolidate(params, state)
    train(tx, loss_fn, flushed, [batch_of()], mesh(), state=left)


def test_a_round_with_residuals_of_gradients_has_to_end(caplog):
    outer = optax.chain(optax_ext.quantized(axis="data"), optax.sgd(1.0))
    tx = optax_ext.local_steps(optax.sgd(0.1), outer, every=2)
    _, first, second = train(tx, loss_fn, PARAMS, [batch_of()] * 2, mesh())
    assert "evaluate and save them" in caplog.text
    assert "flush" not in caplog.text
    refused("Take steps to the end of the round. Then use", optax_ext.flush, *first[:2])
    refused("Take steps to the end of the round first", optax_ext.consolidate, *first[:2])
    found, _ = optax_ext.consolidate(*second[:2])
    assert any(x.any() for x in jax.tree.leaves(found))


def test_a_movement_that_is_no_rounding_error_or_of_other_parameters_is_refused():
    outer = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    tx = optax_ext.local_steps(optax.sgd(0.1), outer, every=2)
    params = {"a": jnp.ones(7, jnp.bfloat16)}
    for workers in (1, 2):
        state = optax_ext.init_state(tx, params, {"data": workers})
        # The workers may have moved alike.
        moved = state._replace(moved={"a": jnp.full((workers, 7), -0.5)})
        refused("in the middle of a round", optax_ext.consolidate, params, moved)
        rounding = state._replace(moved={"a": jnp.full((workers, 7), 1e-4)})
        optax_ext.consolidate(params, rounding)
        # On the devices of other workers, as after a reshard.
        there = jax.device_put(rounding, jax.devices()[-1])
        optax_ext.consolidate(jax.device_put(params, jax.devices()[0]), there)
        for other in (
            {"a": jnp.ones(1)},
            {"a": jnp.ones((7, 1))},
            {"a": jnp.ones(0, jnp.bfloat16)},
        ):
            for function in (optax_ext.flush, optax_ext.consolidate):
                refused(r"params\['a'\] has shape", function, other, moved)


def test_flush_refuses_an_update_that_is_on_its_way():
    tx = optax_ext.published.streaming_diloco(
        optax.sgd(0.1), axis="data", every=4, fragments=1, delay=2, mixing=0.0
    )
    found = train(tx, loss_fn, PARAMS, [batch_of()] * 4, mesh())
    refused("on its way", optax_ext.flush, *found[3][:2])
    optax_ext.flush(*found[4][:2])


def test_local_steps_that_can_not_be():
    refused("every must be an integer", rounds, every=0)
    refused("fragments must be an integer", rounds, every=4, fragments=1.5)
    refused("every=10 is no multiple of fragments=4.*every=12", rounds, every=10, fragments=4)
    refused("delay=2 .*less than every / fragments = 2", rounds, every=4, fragments=2, delay=2)
    refused("mixing must be a number", rounds, every=4, mixing=1.5)
    few = rounds(every=4, fragments=4)
    refused("fragments=4 are groups of leaves, .*have 2", few.init, {"a": 0.0, "b": 1.0})
    none = optax_ext.local_steps(optax.sgd(0.1), optax.sgd(1.0), every=2)
    refused("outer of .* has no sparse allreduce", none.init, jnp.zeros(3))
    inside = optax_ext.sparse_sgd(1.0, axis="w", every=4)
    twice = optax_ext.local_steps(optax.sgd(0.1), inside, every=2)
    refused("outer .* has every=4.*local_steps alone", run, twice, normal((1, 2, SIZE)))
    state = run(MEAN, normal((1, 2, SIZE))).states
    refused("state of optax_ext.local_steps", rounds(every=2).update, 0.0, state, error=TypeError)


def test_gradients_at_the_common_parameters_are_warned_of():
    tx = rounds(every=2)

    def step(params, target):
        gradient = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
        return tx.update(gradient, tx.init(params), params)[0]

    with pytest.warns(UserWarning, match="optax_ext.ahead"):
        sc.simulate(step, axis="w", axis_size=2, in_axes=(None, 0))(jnp.zeros(3), jnp.ones((2, 3)))


@pytest.mark.parametrize("name", ["diloco", "sparse_loco", "local_steps"])
@pytest.mark.one_in(2)
def test_a_group_of_the_parameters_takes_local_steps_as_it_does_alone(name):
    inner, on = optax.sgd(0.1), mesh(WORKERS, "w")
    tx = {
        "diloco": optax_ext.published.diloco(inner, axis="w", every=3),
        "sparse_loco": optax_ext.published.sparse_loco(inner, density=0.5, axis="w", every=3),
        "local_steps": optax_ext.local_steps(inner, optax_ext.sparse_sgd(1.0, axis="w"), every=3),
    }[name]
    frozen = optax.chain(optax_ext.dense(axis="w"), optax.set_to_zero())
    grouped = optax.partition({"t": tx, "f": frozen}, {"w": "t", "b": "f"})
    start = {"w": jnp.full((6, 4), 0.1), "b": jnp.ones(4)}

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] + params.get("b", start["b"])[None]) ** 2)

    results = []
    for made, params in ((grouped, start), (tx, {"w": start["w"]})):
        state = optax_ext.init_state(made, params, on)
        step = optax_ext.make_train_step(loss, made, on, donate=False)
        for i in range(5):  # Into the second round.
            batch = np.random.default_rng(i).standard_normal((WORKERS * 2, 6)).astype(np.float32)
            params, state, losses = step(params, state, batch)
        results.append((params["w"], losses))
    same(*results)
