"""Rounds whose exchange overlaps their local steps: updates arrive late, and nothing is lost."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import PARAMS, batch_of, loss_fn, mesh, normal, refused, slow_but

WORKERS, SIZE, EVERY = 4, 40, 3
sgd = functools.partial(optax_ext.sparse_sgd, 0.1, axis="data", every=EVERY)
adamw_of = functools.partial(optax_ext.sparse_adamw, axis="data", every=EVERY)
adamw = functools.partial(adamw_of, 0.1)


def distance(params, target):
    return 0.5 * jnp.sum((params - target[0]) ** 2)


def other_devices(workers=WORKERS):
    """A mesh like ``mesh``, of other devices."""
    devices = np.asarray(jax.devices()[workers : 2 * workers])
    return Mesh(devices, ("data",), axis_types=mesh(workers).axis_types)


def rounds_of(tx, given, loss=distance, params=None, on=None, **options):
    """Parameters and state before the first round and after each."""
    params = jnp.asarray(normal(SIZE, 5)) if params is None else params
    on = mesh(WORKERS) if on is None else on
    take = optax_ext.make_train_round(loss, tx, on, donate=False, **options)
    found = [(params, optax_ext.init_state(tx, params, on), None)]
    for batches in given:
        found.append(take(*found[-1][:2], batches))
    return found


def targets(rounds, every=EVERY, seed=0):
    return (2 + normal((rounds, every, WORKERS, SIZE), seed)).astype(np.float32)


def test_what_the_others_moved_arrives_a_round_later():
    """All of it in NumPy: local steps from w + r_i, while the largest entries of r_i are sent."""
    given, k, rate = targets(4), 6, 0.1
    tx = sgd(density=k / SIZE, allreduce=sc.allreduce.topk_a())
    found = rounds_of(tx, given)
    w, residual = normal(SIZE, 5).astype(np.float64), np.zeros((WORKERS, SIZE))
    for r, batches in enumerate(given):
        order = np.argsort(-np.abs(residual), axis=1)[:, :k]
        sent = np.zeros_like(residual)
        np.put_along_axis(sent, order, np.take_along_axis(residual, order, 1), 1)
        losses = []
        for target in batches:
            losses.append(0.5 * np.sum((w + residual - target) ** 2, axis=1))
            residual = residual - rate * (w + residual - target)
        w, residual = w + sent.mean(0), residual - sent
        params, state, seen = found[r + 1]
        np.testing.assert_allclose(params, w, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.residual, residual, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(seen, losses, rtol=1e-4)
        assert int(state.count) == EVERY * (r + 1)


EXCHANGES = {
    "partitioned_topk": adamw(density=0.2),
    "in 8 bits": adamw(density=0.2, allreduce=sc.allreduce.partitioned_topk(bits=8)),
    "ok_topk": adamw(density=0.2, allreduce=sc.allreduce.ok_topk(density=0.2)),
    "limited": adamw(density=0.2, limit=1e-3),
    "of leaves": adamw(density=0.2, moments="factors"),
    "in bfloat16": adamw(
        density=0.2, allreduce=sc.allreduce.topk_a(codec=sc.wire.narrow8()), weight_decay=0.1
    ),
    # The limit follows a learning rate that only the state holds.
    "injected": optax.inject_hyperparams(
        lambda learning_rate: adamw_of(lambda count: learning_rate, density=0.05)
    )(learning_rate=1e-3),
    "chained": optax.chain(sgd(density=0.3), optax.keep_params_nonnegative()),
}


@pytest.mark.parametrize(
    "name", slow_but(("partitioned_topk", "limited", "injected", "chained"), EXCHANGES)
)
@pytest.mark.one_in(4)
def test_other_devices_find_the_same(name):
    tx, given = EXCHANGES[name], normal((3, EVERY, 4 * WORKERS, 6))
    found = rounds_of(tx, given, loss_fn, PARAMS)
    beside = rounds_of(tx, given, loss_fn, PARAMS, exchange_mesh=other_devices())
    for ours, theirs in zip(found, beside, strict=True):
        # The compiler fuses three programs, and so rounds them, differently from one.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            ours[:2],
            theirs[:2],
        )
    states = [optax_ext.get_state(state) for _, state, _ in found]
    assert all(int(state.info.delivered) > 0 for state in states[2:])


def test_residuals_and_parameters_hold_all_that_workers_have_moved():
    """Steps of minus the gradient, and a loss whose gradient is the batch: the sum is known."""
    tx = optax_ext.sparse_sgd(1.0, density=0.2, axis="data", every=EVERY)
    given = targets(5)
    found = rounds_of(tx, given, lambda w, x: jnp.sum(w * x[0]))
    before = np.asarray(found[0][0], np.float64)
    for r, (params, state, _) in enumerate(found):
        moved = -given[:r].sum((0, 1), dtype=np.float64)  # of each worker
        left = np.asarray(state.residual, np.float64)
        delivered = WORKERS * (np.asarray(params, np.float64) - before)
        np.testing.assert_allclose(delivered + left.sum(0), moved.sum(0), atol=2e-4)
        if r > 1:
            assert np.any(delivered)


def test_a_round_sends_the_words_of_one_exchange():
    on, tx = mesh(WORKERS), adamw(density=0.1)
    state = optax_ext.init_state(tx, PARAMS, on)
    step = optax_ext.make_train_step(loss_fn, tx, on)
    take = optax_ext.make_train_round(loss_fn, tx, on)
    one = sc.traffic.of_traced(step.trace(PARAMS, state, batch_of()))
    batches = np.stack([batch_of()] * EVERY)
    whole = sc.traffic.of_traced(take.trace(PARAMS, state, batches))
    assert whole.words == pytest.approx(EVERY * one.words)
    assert all(row.weight == 1 for row in whole.collectives)


def test_a_round_lowers_for_gpus():
    on, tx = mesh(WORKERS), adamw(density=0.1)
    take = optax_ext.make_train_round(loss_fn, tx, on)
    state, batches = optax_ext.init_state(tx, PARAMS, on), np.stack([batch_of()] * EVERY)
    traced = take.trace(PARAMS, state, batches)
    assert "all_gather" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_steps_and_rounds_may_take_turns():
    on, tx = mesh(WORKERS), sgd(density=0.3)
    params, state = PARAMS, optax_ext.init_state(tx, PARAMS, on)
    step = optax_ext.make_train_step(loss_fn, tx, on)
    take = optax_ext.make_train_round(loss_fn, tx, on)
    batches = np.stack([batch_of(seed=i) for i in range(EVERY)])
    losses = []
    for _ in range(10):
        params, state, seen = take(params, state, batches)
        for batch in batches:
            params, state, _ = step(params, state, batch)
        losses.append(float(seen.mean()))
    assert losses[-1] < 0.5 * losses[0]
    params, state, _ = step(params, state, batches[0])
    refused("in the middle of a round of +3", take, params, state, batches)


@pytest.mark.slow
def test_what_is_not_finite_is_left_out_by_its_worker():
    given = targets(3)
    given[0, 1, 2] = np.nan
    params, state, _ = rounds_of(sgd(density=0.3), given)[-1]
    assert np.asarray(state.missed).tolist() == [0, 0, 1, 0]
    assert np.isfinite(np.asarray(params)).all()
    assert np.isfinite(np.asarray(state.residual)).all()


def test_what_a_round_cannot_do_is_an_error_that_says_so():
    on, batches = mesh(WORKERS), np.stack([batch_of()] * EVERY)

    def call(tx, batches=batches, **options):
        state = optax_ext.init_state(tx, PARAMS, on)
        return optax_ext.make_train_round(loss_fn, tx, on, **options)(PARAMS, state, batches)

    refused(r"every=\[1\].*every=10", call, optax_ext.sparse_sgd(0.1, axis="data"))
    refused(r"every=\[1\]", call, optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0)))
    refused("the batches of 3 steps", call, sgd(), batches[:2])
    refused("the batches of 3 steps", call, sgd(), batches[:, 0, 0])
    refused("multiple of the 4 workers", call, sgd(), batches[:, :3])
    refused("dense_steps=2", call, sgd(dense_steps=2))
    refused("decay=0.9", call, sgd(residual=optax_ext.residual(decay=0.9, step_ahead=math.inf)))
    refused("accumulates gradients", call, optax_ext.multi_steps(sgd(), 2))
    beside = optax_ext.make_train_round(loss_fn, sgd(), on, exchange_mesh=other_devices())
    state = optax_ext.init_state(sgd(), PARAMS, on)
    refused("three programs", beside.trace, PARAMS, state, batches, error=TypeError)
    refused("without exchange_mesh", jax.jit(beside), PARAMS, state, batches, error=TypeError)
    kept = optax_ext.make_train_round(
        loss_fn, sgd(), on, exchange_mesh=other_devices(), donate=False
    )
    refused("three programs", jax.jit(kept), PARAMS, state, batches, error=TypeError)
    refused("both have device", call, sgd(), exchange_mesh=on)
    refused("has the axes", call, sgd(), exchange_mesh=other_devices(2))
    refused("must be a function", optax_ext.make_train_round, 3, sgd(), on, error=TypeError)
