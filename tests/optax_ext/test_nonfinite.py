"""Gradients and sums over the workers that are not finite, by policy.

Each cell of the table in the docstring of ``sparse_allreduce`` has a test. test_contract.py checks
for every transformation that a skipped step changes nothing, and test_largest_gradients.py covers
gradients that are too large next to the gradients of other workers.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import (
    fails_in_the_step,
    mapped,
    mesh,
    normal,
    plain_sum,
    run,
    slow,
)

LARGE = np.float32(3e38)
WORKERS, STEPS, SIZE = 3, 6, 40
POLICIES = ("skip", "drop", "raise", "propagate")
UNDECAYED = functools.partial(optax_ext.sparse_adamw, axis="w", weight_decay=0.0)


def spoiled():
    bad = normal((STEPS, WORKERS, SIZE))
    bad[2, 1, 7], bad[2, 0, 9], bad[4, 2, 7] = np.nan, np.inf, -np.inf
    return bad


def summing(density, allreduce=None, **options):
    selector = sc.select.topk(density=density)
    allreduce = plain_sum() if allreduce is None else allreduce
    return optax_ext.sparse_allreduce(selector, allreduce, axis="w", **options)


@pytest.mark.slow
def test_dropped_entries_do_not_stay_in_a_velocity_or_an_average():
    """Otherwise it would stay NaN."""
    drop = functools.partial(optax_ext.topk_a, 0.1, axis="w", nonfinite="drop")
    momentum = optax_ext.momentum_correction(0.9, masking=False)
    velocities = run(drop(correction=momentum), spoiled()).state.velocity
    assert np.isfinite(velocities).all()
    np.testing.assert_array_equal(velocities[2, 1, 0, 7], velocities[1, 1, 0, 7])

    found = run(drop(local=optax.ema(0.9, debias=False)), spoiled())
    assert found.last.dropped.tolist() == [3] * WORKERS
    assert found.last.count.tolist() == [STEPS] * WORKERS
    good, average, expected = np.where(np.isfinite(spoiled()), spoiled(), 0), 0.0, 0.0
    for gradient in good:
        average = 0.9 * average + 0.1 * gradient
        expected = expected + average.sum(0, dtype=np.float64)
    applied = WORKERS * found.updates[:, 0].sum(0, dtype=np.float64)
    np.testing.assert_allclose(applied + found.residuals[-1].sum(0), expected, atol=1e-5)


@pytest.mark.parametrize("dense_total", [True, False])
def test_nan_that_propagates_has_the_same_bits_on_all_workers(dense_total):
    """The workers of a recursive doubling add the same NaN, of both signs, in other orders."""
    nan, infinite = np.float32(np.nan), np.float32(np.inf)
    of_three = list(itertools.product([nan, -nan, infinite, -infinite, 1], repeat=3))
    data = np.tile(np.asarray(of_three, np.float32).T, (2, 1))[None]
    published = sc.allreduce.published
    exchange = (
        published.ssar_recursive_double(codec=sc.wire.narrow8())
        if dense_total
        else published.gtopk(density=1.0)
    )
    found = run(summing(1.0, exchange, nonfinite="propagate"), data)
    update = found.updates[0]
    assert np.isnan(update).sum() > update.size / 4
    bits = update.view(np.uint32)
    np.testing.assert_array_equal(bits, np.broadcast_to(bits[0], bits.shape))


@pytest.mark.slow
@pytest.mark.parametrize("make", [optax_ext.topk_a, optax_ext.ok_topk])
def test_propagate_hands_on_what_is_not_finite(make):
    found = run(make(0.1, axis="w", nonfinite="propagate"), spoiled()[:3])
    assert np.isnan(found.updates[2, :, 7]).all()
    assert np.isinf(found.updates[2, :, 9]).all()
    assert found.last.skipped.tolist() == [0] * WORKERS
    # It was delivered, so it is in no residual.
    assert np.isfinite(found.residuals).all()
    # The same holds for a sum that overflows.
    found = run(summing(0.25, nonfinite="propagate"), LARGE_SUMS[:1])
    assert np.isinf(found.updates[0, :, 3]).all()
    assert not found.residuals.any()
    assert found.last.withheld.tolist() == [0, 0]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_raise_on_a_mesh(every):
    """On all workers, also in rounds: the others would wait for one that has ended."""
    local = optax.scale(-0.1) if every > 1 else None
    tx = optax_ext.topk_a(0.1, axis="data", nonfinite="raise", every=every, local=local)
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), mesh(8))
    step, given = mapped(tx, mesh(8), state), np.ones((2, 8, SIZE), np.float32)
    given[1, 3, 5] = np.nan
    _, state = step(given[0], state)
    jax.effects_barrier()
    fails_in_the_step(lambda: step(given[1], state), "step 1: the gradient of some worker")


@pytest.mark.parametrize("policy", [slow("skip"), slow("drop"), "propagate"])
def test_nonfinite_sum_of_gradient_and_residual(policy):
    """Worker 0 keeps 1e38 at index 2, since index 3 is larger, and gets 3e38 more."""
    given = np.zeros((2, 2, 4), np.float32)
    given[0, 0, 2], given[0, 0, 3] = 1e38, 2e38  # at density 1/4 only index 3 is sent
    given[1, 0, 2] = LARGE
    found = run(summing(0.25, nonfinite=policy), given)
    updates, residuals = found.updates, found.residuals
    assert residuals[0, 0].tolist() == [0, 0, np.float32(1e38), 0]
    assert np.isfinite(residuals).all()
    assert found.last.skipped.tolist() == [policy == "skip"] * 2
    assert found.last.dropped.tolist() == [policy == "drop"] * 2
    if policy == "propagate":
        assert np.isinf(updates[1, :, 2]).all()
    if policy == "skip":
        assert not updates[1].any()
        np.testing.assert_array_equal(residuals[1], residuals[0])
    if policy == "drop":
        # The increment is left out, and the old residual is sent.
        np.testing.assert_array_equal(updates[1], [[0, 0, np.float32(1e38) / 2, 0]] * 2)


# Index 3 is too large for a sum of two workers, until both have taken 2e38 back.
LARGE_SUMS = np.zeros((3, 2, 8), np.float32)
LARGE_SUMS[0, :, 3], LARGE_SUMS[0, :, 5] = LARGE, (1.0, 3.0)
LARGE_SUMS[1, :, 6] = 2.0
LARGE_SUMS[2, :, 3] = -2e38


# Some of the allreduces keep their sums in range, and some do not.
@pytest.mark.parametrize(
    ("policy", "exchange"),
    [
        slow("skip", plain_sum()),
        ("drop", plain_sum()),
        slow("raise", plain_sum()),
        slow("skip", sc.allreduce.topk_a()),
        slow("skip", sc.allreduce.dense()),
        slow("skip", sc.allreduce.published.dsar_split_allgather()),
    ],
)
def test_overflow_of_a_sum_stays_with_the_workers(policy, exchange):
    found = run(summing(0.25, exchange, nonfinite=policy), LARGE_SUMS)
    updates, residuals = found.updates, found.residuals
    jax.effects_barrier()
    # The others are delivered meanwhile, and the entry itself as soon as its sum is finite.
    np.testing.assert_array_equal(updates[0, :, 5], 2.0)
    np.testing.assert_array_equal(updates[1, :, 6], 2.0)
    given, kept = (x.astype(np.float64).sum(1) for x in (LARGE_SUMS, residuals))
    applied, before = 2 * updates[:, 0].astype(np.float64), np.vstack([0 * kept[:1], kept[:-1]])
    np.testing.assert_allclose(applied + kept, before + given, rtol=1e-6)
    assert found.last.skipped.tolist() == found.last.dropped.tolist() == [0, 0]
    assert found.last.count.tolist() == [3, 3]
    if exchange.spec is None:
        np.testing.assert_array_equal(residuals[:2, :, 3], np.full((2, 2), LARGE))
        np.testing.assert_array_equal(updates[:2, :, 3], 0)
        np.testing.assert_allclose(updates[2, :, 3], 1e38, rtol=1e-6)
        assert found.last.withheld.tolist() == [2, 2]


@pytest.mark.parametrize("make", [optax_ext.sparse_adamw, optax_ext.sparse_sgd])
@pytest.mark.parametrize("large", [2.0**62, 2.0**63, -(2.0**64), 1e38, np.nan])
@pytest.mark.one_in(3)
def test_overflow_of_a_square_is_not_accumulated(make, large):
    """The gradient is checked, not the optimizer's step, which is finite and meaningless.

    The second moment of an entry that was once infinite would stop that entry for good.
    """
    given = normal((STEPS, WORKERS, SIZE))
    given[2, 1, 7] = large
    found = run(make(0.1, density=0.5, axis="w", weight_decay=0.0), given)
    proceeds = abs(large) < 2.0**63
    assert found.last.skipped.tolist() == [0 if proceeds else 1] * WORKERS
    assert np.isfinite(found.residuals).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.last.local))


def test_overflow_of_a_square_is_dropped():
    given = normal((STEPS, WORKERS, SIZE))
    given[2, 1, 7] = 2.0**64
    found = run(UNDECAYED(0.1, density=0.5, nonfinite="drop"), given)
    assert found.last.dropped.tolist() == [1] * WORKERS
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found.last.local))


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (optax_ext.sparse_adamw, np.nan),
        (optax_ext.sparse_adamw, np.inf),
        (optax_ext.sparse_sgd, 1e35),  # A gradient of 1e4 would have an infinite increment.
    ],
)
@pytest.mark.one_in(3)
def test_overflow_of_an_increment_by_its_rate_takes_no_step(make, rate):
    """The gradients do not show it; the increment of the largest possible gradient does."""
    tx = make(lambda count: jnp.where(count == 2, rate, 0.1), axis="w", weight_decay=0.0)
    found = run(tx, normal((STEPS, WORKERS, SIZE)))
    # A schedule counts the steps that were taken.
    assert found.last.skipped.tolist() == [STEPS - 2] * WORKERS
    assert np.isfinite(found.residuals).all()


@pytest.mark.parametrize(
    ("where", "policy"),
    [
        ("leaf", "drop"),
        *(slow("leaf", policy) for policy in POLICIES if policy != "drop"),
        *(slow("steps", policy) for policy in POLICIES),
    ],
)
def test_overflow_of_a_dense_sum_is_left_out_and_counted(where, policy):
    """Dense leaves have no residual, so their sum cannot wait."""
    given = np.zeros((2, 2, 6), np.float32)
    given[0, :, 1], given[0, :, 4] = LARGE, (1.0, 2.0)
    given[1] = 1.0
    options, trees = {"dense_steps": 1}, {"b": given}
    if where == "leaf":
        options = {"dense_leaves": {"a": "sparse", "b": "dense"}}
        trees["a"] = np.ones((2, 2, 1), np.float32)
    found = run(optax_ext.topk_a(1.0, axis="w", nonfinite=policy, **options), trees)
    jax.effects_barrier()
    updates, propagates = found.updates["b"], policy == "propagate"
    np.testing.assert_array_equal(updates[0, :, 1], np.inf if propagates else 0.0)
    np.testing.assert_array_equal(updates[0, :, 4], 1.5)
    np.testing.assert_array_equal(updates[1], 1.0)
    assert not found.residuals.any()
    assert found.last.dropped.tolist() == [0 if propagates else 1] * 2
    assert found.last.withheld.tolist() == found.last.skipped.tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_overflow_of_a_float16_leaf_by_its_residual(policy):
    """One of 16 equal entries is sent at each step, so the last one waits for 15 steps."""
    given = np.full((20, 2, 16), 2e4, np.float16)
    found = run(optax_ext.ok_topk(1 / 16, axis="w", nonfinite=policy), given)
    updates, withheld = found.updates, found.last.withheld.tolist()
    jax.effects_barrier()
    assert updates.dtype == np.float16
    assert np.isfinite(found.residuals).all()
    if policy == "propagate":
        assert np.isinf(updates).any()
        assert withheld == [0, 0]
        return
    assert updates.max() == np.finfo(np.float16).max
    # They are integers, which are not rounded.
    applied = 2 * updates[:, 0].astype(np.float64).cumsum(0)
    kept = found.residuals.astype(np.float64).sum(1)
    np.testing.assert_array_equal(applied + kept, given.astype(np.float64).sum(1).cumsum(0))
    assert withheld == [(updates[:, 0] == np.finfo(np.float16).max).sum()] * 2
    assert found.last.skipped.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("policy", "expected"), [("skip", np.finfo(np.float16).max), ("propagate", np.inf)]
)
@pytest.mark.one_in(2)
def test_narrow_leaf_that_is_dense_saturates(policy, expected):
    options = {"dense_leaves": "dense", "local": optax.scale(2.0), "nonfinite": policy}
    tx = optax_ext.topk_a(0.5, axis="w", **options)
    found = run(tx, np.full((1, 2, 4), 6e4, np.float16))
    np.testing.assert_array_equal(found.updates, np.full((1, 2, 4), expected, np.float16))
    assert found.last.skipped.tolist() == [0, 0]
    # No residual takes the rest.
    assert found.last.dropped.tolist() == [4 if policy == "skip" else 0] * 2
