"""An exchange every H steps: local steps in between, without a collective, and nothing is lost."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback import _residual
from tests.optax_ext.helpers import (
    PARAMS,
    batch_of,
    fails_in_the_step,
    loss_fn,
    mesh,
    normal,
    plain_sum,
    refused,
    run,
    same,
    slow,
    train,
)

WORKERS, SIZE, EVERY = 3, 40, 3
MINUS = optax.scale(-1.0)
LOCAL = optax_ext.residual(step_ahead=math.inf)
topk_a = functools.partial(optax_ext.topk_a, axis="w", local=MINUS, every=EVERY)


def distance(params, target):
    """Half of the squared distance to it, whose gradient depends on the parameters."""
    return 0.5 * jnp.sum((params - target[0]) ** 2)


def targets(steps, workers=4, seed=0):
    return (2 + normal((steps, workers, SIZE), seed)).astype(np.float32)


def trained(tx, given, **options):
    params = jnp.asarray(normal(SIZE, 5))
    return train(tx, distance, params, given, mesh(given.shape[1]), **options)


def test_rounds_that_send_all_are_the_average_of_local_steps():
    """Local SGD: every worker trains alone, and continues from the mean at each exchange."""
    given, rate = targets(8), 0.1
    tx = optax_ext.sparse_sgd(
        rate, density=1.0, every=4, axis="data", allreduce=sc.allreduce.dense()
    )
    found = trained(tx, given)
    local = np.repeat(normal(SIZE, 5)[None], 4, axis=0).astype(np.float64)
    common = local.mean(0)
    for step, target in enumerate(given):
        local = local - rate * (local - target)
        if step % 4 == 3:
            common = local.mean(0)
            local = np.repeat(common[None], 4, axis=0)
        params, state, _ = found[step + 1]
        np.testing.assert_allclose(params, common, rtol=1e-5, atol=1e-6)
        kept = np.asarray(state.residual)
        np.testing.assert_allclose(np.asarray(params) + kept, local, rtol=1e-5, atol=1e-6)


def test_sparse_adamw_in_rounds_is_what_it_says():
    """All of it in NumPy: local steps of Adam, the sent entries, their limit, the decay."""
    eps, rate, workers, k = 0.5, 0.05, 4, 4
    given = targets(7)
    tx = optax_ext.sparse_adamw(
        *(rate,),
        density=k / SIZE,
        axis="data",
        eps=eps,
        weight_decay=0.1,
        every=EVERY,
        allreduce=sc.allreduce.topk_a(),
    )
    found = trained(tx, given)
    w = normal(SIZE, 5).astype(np.float64)
    residual, mu, nu = np.zeros((3, workers, SIZE))
    for t, target in enumerate(given):
        gradient = w + residual - target
        mu, nu = 0.9 * mu + 0.1 * gradient, 0.999 * nu + 0.001 * gradient**2
        first, second = mu / (1 - 0.9 ** (t + 1)), nu / (1 - 0.999 ** (t + 1))
        residual = residual - rate * first / (np.sqrt(second) + eps)
        moved = np.zeros(SIZE)
        if (t + 1) % EVERY == 0:
            order = np.argsort(-np.abs(residual), axis=1)[:, :k]
            sent = np.zeros_like(residual)
            np.put_along_axis(sent, order, np.take_along_axis(residual, order, 1), 1)
            mean, bound = sent.mean(0), 2 * rate * EVERY * max(1, 0.05 * SIZE / k)
            moved = mean - 0.75 * (mean - np.clip(mean, -bound, bound))
            residual = residual - sent + (mean - moved)
        w = w + moved - rate * 0.1 * w
        params, state, _ = found[t + 1]
        np.testing.assert_allclose(params, w, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.residual, residual, rtol=1e-3, atol=1e-5)


def words(tx, workers=4):
    on = mesh(workers)
    state = optax_ext.init_state(tx, PARAMS, on)
    step = optax_ext.make_train_step(loss_fn, tx, on)
    return sc.traffic.of_traced(step.trace(PARAMS, state, batch_of()))


def test_rounds_have_no_collective_in_between():
    adamw = functools.partial(optax_ext.sparse_adamw, 0.1, density=0.1, axis="data")
    each, rounds = words(adamw()), words(adamw(every=5))
    # The loss, and the agreement on steps that are skipped, are a word each of four workers.
    assert rounds.words == pytest.approx((each.words - 2 * 2 * 3 / 4) / 5)
    assert all(row.weight == 1 / 5 for row in rounds.collectives)


def test_rounds_report_the_words_in_the_step_of_the_exchange_alone():
    found = run(topk_a(0.1), normal((7, WORKERS, SIZE))).state.info
    formula = sc.cost_model.predict(
        "topk_a", sc.cost_model.Workload(SIZE, 4, WORKERS)
    ).expected.words
    assert found.words[:, 0].tolist() == [0, 0, formula, 0, 0, formula, 0]
    assert found.selected[:, 0, 0].tolist() == [0, 0, 4, 0, 0, 4, 0]
    # The threshold is from the last exchange, and drifts from one to the next.
    thresholds = found.local_threshold[:, 0, 0]
    assert thresholds[2] == thresholds[3] == thresholds[4] != thresholds[5]
    assert (found.threshold_drift[:, 0, 0] != 0).tolist() == [False] * 5 + [True, False]


@pytest.mark.parametrize("step", [1, 2], ids=["in between", "at the exchange"])
@pytest.mark.parametrize("policy", ["skip", slow("drop"), slow("raise"), "propagate"])
@pytest.mark.one_in(2)
def test_rounds_let_a_worker_leave_out_its_own_step_and_nobody_waits(step, policy):
    """Its residual waits or is sent as if its gradient, or one entry of it, had been zero."""
    given = normal((6, WORKERS, SIZE))
    bad = given.copy()
    bad[step, 1, 7] = np.nan
    instead = given.copy()
    if policy == "drop":
        instead[step, 1, 7] = 0
    else:
        instead[step, 1] = 0
    tx = topk_a(0.1, nonfinite=policy)
    if policy == "propagate":
        assert np.isnan(run(tx, bad).updates[2, :, 7]).all()
        return
    if policy == "raise":
        fails_in_the_step(lambda: run(tx, bad), f"step {step}: the gradient of some worker")
        return
    found, expected = run(tx, bad), run(tx, instead)
    np.testing.assert_array_equal(found.updates, expected.updates)
    np.testing.assert_array_equal(found.residuals, expected.residuals)
    assert found.last.missed.ravel().tolist() == [0, 1, 0]
    assert found.last.count.tolist() == [6] * WORKERS
    assert not found.last.skipped.any()
    assert not found.last.dropped.any()


@pytest.mark.parametrize("elementwise", [True, slow(False)])
def test_moments_in_rounds_are_not_spoiled_by_a_step_that_is_left_out(elementwise):
    given = normal((4, WORKERS, SIZE))
    given[1, 1, 7] = np.inf
    moments = "entries" if elementwise else "factors"
    tx = optax_ext.sparse_adamw(0.1, axis="w", weight_decay=0.0, every=EVERY, moments=moments)
    found = run(tx, given)
    counts = optax.tree.get_all_with_path(found.last.local, "count")
    assert counts[0][1].ravel().tolist() == [4, 3, 4]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.last.local))


def test_overflow_of_a_sum_waits_for_the_next_round():
    given = np.zeros((4, 2, 8), np.float32)
    given[0, :, 3] = 3e38
    given[2, :, 3] = -2e38
    tx = optax_ext.sparse_allreduce(
        *(sc.select.topk(density=0.25), plain_sum()),
        axis="w",
        local=MINUS,
        every=2,
    )
    found = run(tx, given)
    assert not found.updates[:3].any()
    np.testing.assert_array_equal(found.residuals[1, :, 3], -given[0, :, 3])
    np.testing.assert_allclose(found.updates[3, :, 3], -1e38, rtol=1e-6)
    assert found.last.withheld.tolist() == [1, 1]


def test_residual_decays_once_in_a_round():
    given = np.zeros((4, 2, 4), np.float32)
    given[0] = [[4.0, 1.0, 0.0, 0.0], [2.0, 0.0, 8.0, 0.0]]
    tx = optax_ext.topk_a(
        *(0.25,), axis="w", local=MINUS, every=2, residual=optax_ext.residual(decay=0.5)
    )
    found = run(tx, given)
    assert found.residuals[0].tolist() == (-given[0]).tolist()
    # The residuals are halved, and each worker sends its largest entry.
    assert found.updates[1, 0].tolist() == [-1.0, 0.0, -2.0, 0.0]
    assert found.residuals[1].tolist() == [[0.0, -0.5, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]


def test_dense_steps_come_whenever_they_are_due():
    given = normal((5, WORKERS, SIZE))
    found = run(topk_a(0.1, dense_steps=2), given)
    np.testing.assert_allclose(found.updates[:2, 0], -given[:2].mean(1), atol=1e-6)
    assert not found.residuals[:2].any()
    assert [bool(x.any()) for x in found.updates[2:]] == [True, False, False]


def test_rounds_go_on_from_a_checkpoint_and_with_other_workers():
    given = targets(6)
    tx = optax_ext.sparse_sgd(0.1, density=0.2, every=4, axis="data")
    params, state, _ = trained(tx, given[:2])[-1]
    whole = trained(tx, given)[-1]
    metadata = optax_ext.checkpoint_metadata(state)
    optax_ext.check_metadata(metadata, optax_ext.init_state(tx, params, mesh(4)))
    step = optax_ext.make_train_step(distance, tx, mesh(4), donate=False)
    saved = jax.device_get((params, state))
    for target in given[2:]:
        saved = step(*saved[:2], target)
    same(saved[:2], whole[:2])
    # Two workers take over the steps of four since the last exchange.
    state = state._replace(missed=jnp.array([1, 0, 2, 0], jnp.int32))
    fewer = optax_ext.reshard(state, optax_ext.init_state(tx, params, mesh(2)))
    assert fewer.missed.tolist() == [3, 0]
    means = [np.asarray(x.residual, np.float64).mean(0) for x in (state, fewer)]
    np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-8)
    step = optax_ext.make_train_step(distance, tx, mesh(2), donate=False)
    moved = []
    for target in targets(2, workers=2):
        before = params
        params, fewer, _ = step(jax.device_get(params), fewer, target)
        moved.append(bool((np.asarray(params) != np.asarray(before)).any()))
    assert moved == [False, True]


def test_state_without_rounds_is_what_it_was():
    tx = optax_ext.sparse_adamw(0.1, axis="data", every=1)
    state = optax_ext.init_state(tx, PARAMS, mesh())
    assert state.missed == ()
    assert state.settings.every == 1
    assert _residual.share(math.inf, 8) == 1.0


@pytest.mark.parametrize("every", [0, -1, 2.5, "4", True])
def test_every_is_a_positive_integer(every):
    refused("every must be an integer of at least 1, got", topk_a, 0.1, every=every)
    refused("every must be an integer", optax_ext.sparse_adamw, 0.1, axis="w", every=every)


@pytest.mark.slow
def test_first_moment_is_for_rounds():
    adamw = functools.partial(optax_ext.sparse_adamw, 0.1, axis="w", weight_decay=0.0)
    refused(r"b1=0.9 is for rounds \(every=\).*Leave b1 out", adamw, b1=0.9)
    refused('b1=0.9 goes with moments="entries"', adamw, b1=0.9, every=2, moments="rows")
    refused("b1 must be a number in", adamw, b1=1.5, every=2)
    given = normal((3, WORKERS, SIZE))
    plain = [run(adamw(every=2, b1=b1), given).residuals for b1 in (None, 0.9, 0.0)]
    np.testing.assert_array_equal(plain[0], plain[1])
    assert (plain[0] != plain[2]).any()


def test_rounds_are_refused_by_what_has_none():
    refused("every=3 .*local=optax.scale_by_learning_rate.*multi_steps", topk_a, 0.1, local=None)
    refused("every=3 .*Leave out dense_leaves", topk_a, 0.1, dense_leaves=optax_ext.small_leaves())
    message = "every=3 in the state and every=2 in tx.*reshard"
    state = optax_ext.init_state(topk_a(0.1), jnp.zeros(SIZE), mesh(2, "w"))

    def update(gradient, state):
        return topk_a(0.1, every=2).update(gradient[0], state)

    specs = P("w"), optax_ext.state_specs(state)
    step = jax.shard_map(update, mesh=mesh(2, "w"), in_specs=specs, out_specs=(P(), specs[1]))
    refused(message, step, jnp.zeros((2, SIZE)), state)
    refused(
        "no keyword|unexpected keyword", optax_ext.powersgd, 1, axis="w", every=2, error=TypeError
    )
