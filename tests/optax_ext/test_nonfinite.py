"""What is not finite, by policy: a gradient, or a sum over the workers.

Each cell of the table in the docstring of ``sparse_allreduce``. That a skipped step changes
nothing is held for every transformation by test_contract.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import fails_in_the_step, mapped, mesh, normal, run, slow, train

LARGE = np.float32(3e38)
AXES = ("node", "device")
WORKERS, STEPS, SIZE = 3, 6, 40
POLICIES = ("skip", "drop", "raise", "propagate")


def spoiled():
    bad = normal((STEPS, WORKERS, SIZE))
    bad[2, 1, 7], bad[2, 0, 9], bad[4, 2, 7] = np.nan, np.inf, -np.inf
    return bad


def plain_sum():
    """An allreduce as a user may write it: a dense sum, which may overflow."""

    def reduce(coo, state, *, axis):
        total = jax.lax.psum(coo.to_dense(), axis)
        nothing = sc.PaddedCOO(coo.values[:0], coo.indices[:0], coo.size)
        info = sc.ReduceInfo(
            delivered=jnp.sum(total != 0, dtype=jnp.int32),
            overflow=jnp.zeros((), jnp.int32),
            **{name: jnp.zeros(()) for name in ("threshold", "words", "useful")},
        )
        return total, sc.Undelivered(jnp.zeros_like(coo.values), nothing), state, info

    return sc.SparseAllreduce(lambda size, axis_size: (), reduce, keeps_others=False)


def summing(density, allreduce=None, axis="w", **options):
    selector = sc.select.topk(density=density)
    allreduce = plain_sum() if allreduce is None else allreduce
    return optax_ext.sparse_allreduce(selector, allreduce, axis=axis, **options)


# A gradient.


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["residual", "velocity", "average"])
def test_dropped_entries_are_as_if_they_had_not_been(kept):
    """Nor do they stay in a local transformation, whose average would be NaN for good."""
    options = {
        "residual": {},
        "velocity": {"correction": optax_ext.momentum_correction(0.9, masking=False)},
        "average": {"local": optax.ema(0.9, debias=False)},
    }[kept]
    found = run(optax_ext.topk_a(0.1, axis="w", nonfinite="drop", **options), spoiled())
    assert found.last.dropped.tolist() == [3] * WORKERS
    assert found.last.skipped.tolist() == [0] * WORKERS
    assert found.last.count.tolist() == [STEPS] * WORKERS
    assert np.isfinite(found.updates).all()
    good = np.where(np.isfinite(spoiled()), spoiled(), 0)
    if kept == "velocity":
        velocities = found.state.velocity
        assert np.isfinite(velocities).all()
        np.testing.assert_array_equal(velocities[2, 1, 0, 7], velocities[1, 1, 0, 7])
        return
    if kept == "average":
        averages = [0.1 * good[0]]
        for gradient in good[1:]:
            averages.append(0.9 * averages[-1] + 0.1 * gradient)
        good = np.asarray(averages)
    applied = WORKERS * found.updates[:, 0].sum(0, dtype=np.float64)
    expected = good.sum((0, 1), dtype=np.float64)
    np.testing.assert_allclose(applied + found.residuals[-1].sum(0), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [optax_ext.topk_a, optax_ext.ok_topk])
def test_propagate_hands_on_what_is_not_finite(make):
    found = run(make(0.1, axis="w", nonfinite="propagate"), spoiled()[:3])
    assert np.isnan(found.updates[2, :, 7]).all()
    assert np.isinf(found.updates[2, :, 9]).all()
    assert found.last.skipped.tolist() == [0] * WORKERS
    # It was delivered, so it is in no residual.
    assert np.isfinite(found.residuals).all()


def test_raise_on_a_mesh():
    tx = optax_ext.topk_a(0.1, axis="data", nonfinite="raise")
    on = mesh(8)
    state = optax_ext.init_state(tx, jnp.zeros(SIZE), on)
    step = mapped(tx, on, state)
    good = np.ones((8, SIZE), np.float32)
    _, state = step(good, state)
    jax.effects_barrier()
    bad = good.copy()
    bad[3, 5] = np.nan
    fails_in_the_step(lambda: step(bad, state), "step 1: the gradient of some worker")


@pytest.mark.parametrize(
    ("bad", "policy"), [slow(np.nan, "skip"), (np.inf, "skip"), (np.nan, "raise")]
)
def test_with_bad_parameters_every_step_is_skipped_and_counted_or_an_error(bad, policy):
    params = {"w": jnp.ones((SIZE,)).at[3].set(bad)}
    tx = optax_ext.topk_a(0.1, axis="data", nonfinite=policy)
    tx = optax.chain(tx, optax.sgd(0.1, momentum=0.9))

    def steps(count):
        given = [np.ones((8, SIZE), np.float32)] * count
        return train(tx, lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, given, mesh())

    if policy == "raise":
        fails_in_the_step(lambda: steps(1), "step 0: the gradient of some worker")
        return
    for i, (after, state, loss) in enumerate(steps(3)):
        found = optax_ext.get_state(state)
        assert (int(found.skipped), int(found.count)) == (i, 0)
        assert loss is None or not np.isfinite(loss)
        np.testing.assert_array_equal(after["w"], params["w"])
        assert not np.asarray(found.residual).any()


@pytest.mark.parametrize("policy", [slow("skip"), slow("drop"), "propagate"])
def test_the_sum_of_gradient_and_residual(policy):
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
        # The increment is left out, and what was there is sent.
        np.testing.assert_array_equal(updates[1], [[0, 0, np.float32(1e38) / 2, 0]] * 2)


# The sum of finite entries.


def check_conservation(given, updates, residuals):
    """Over ``[steps, workers, n]``: in float64 exact up to a rounding of each step."""
    given, residuals = given.astype(np.float64).sum(1), residuals.astype(np.float64).sum(1)
    applied = updates.shape[1] * updates[:, 0].astype(np.float64)
    before = np.concatenate([np.zeros_like(given[:1]), residuals[:-1]])
    assert np.isfinite(updates).all()
    assert np.isfinite(residuals).all()
    np.testing.assert_allclose(applied + residuals, before + given, rtol=1e-6)


def large_sums():
    """Index 3 is too large for a sum of two workers, until both have taken 2e38 back."""
    given = np.zeros((3, 2, 8), np.float32)
    given[0, :, 3], given[0, :, 5] = LARGE, (1.0, 3.0)
    given[1, :, 6] = 2.0
    given[2, :, 3] = -2e38
    return given


# Whether the allreduce keeps its sums in range by itself or not.
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
def test_a_sum_that_overflows_stays_with_the_workers(policy, exchange):
    found = run(summing(0.25, exchange, nonfinite=policy), large_sums())
    updates, residuals = found.updates, found.residuals
    jax.effects_barrier()
    # The others are delivered meanwhile, and the entry itself as soon as its sum is finite.
    np.testing.assert_array_equal(updates[0, :, 5], 2.0)
    np.testing.assert_array_equal(updates[1, :, 6], 2.0)
    check_conservation(large_sums(), updates, residuals)
    assert found.last.skipped.tolist() == found.last.dropped.tolist() == [0, 0]
    assert found.last.count.tolist() == [3, 3]
    if exchange.spec is None:
        np.testing.assert_array_equal(residuals[:2, :, 3], np.full((2, 2), LARGE))
        np.testing.assert_array_equal(updates[:2, :, 3], 0)
        np.testing.assert_allclose(updates[2, :, 3], 1e38, rtol=1e-6)
        assert found.last.withheld.tolist() == [2, 2]


@pytest.mark.slow
def test_a_sum_that_overflows_reaches_the_update_by_option():
    found = run(summing(0.25, nonfinite="propagate"), large_sums()[:1])
    assert np.isinf(found.updates[0, :, 3]).all()
    assert not found.residuals.any()
    assert found.last.withheld.tolist() == [0, 0]


@pytest.mark.slow
def test_a_sum_between_nodes_that_overflows_stays_with_their_shards():
    given = np.zeros((3, 2, 2, 8), np.float32)
    # 3e38 in each node, and more than float32 holds in both.
    given[0, ..., 1], given[0, ..., 6] = 1.5e38, 1.0
    given[2, ..., 1] = -1e38
    exchange = sc.allreduce.hierarchical(inner_axis="device", outer=plain_sum())
    found = run(summing(0.5, exchange, AXES), given, AXES)
    assert (found.updates[0, ..., 6] == 1).all()
    np.testing.assert_allclose(found.updates[2, ..., 1], 0.5e38, rtol=1e-6)
    residuals = found.residuals.reshape(3, 2, 8)
    check_conservation(given.reshape(3, 4, 8), found.updates.reshape(3, 4, 8), residuals)
    # Of all shards, also of those in which nothing was withheld.
    assert (found.last.withheld == 2).all()


@pytest.mark.parametrize(
    ("where", "policy"),
    [
        ("leaf", "drop"),
        *(slow("leaf", policy) for policy in POLICIES if policy != "drop"),
        *(slow("steps", policy) for policy in POLICIES),
    ],
)
def test_a_dense_sum_that_overflows_is_left_out_and_counted(where, policy):
    """Nothing keeps what goes dense, so that it cannot wait."""
    given = np.zeros((2, 2, 6), np.float32)
    given[0, :, 1], given[0, :, 4] = LARGE, (1.0, 2.0)
    given[1] = 1.0
    if where == "leaf":
        options = {"dense_leaves": lambda params: {"a": "sparse", "b": "dense"}}
        trees = {"a": given[..., :1] * 0 + 1, "b": given}
    else:
        options, trees = {"dense_steps": 1}, {"b": given}
    found = run(optax_ext.topk_a(1.0, axis="w", nonfinite=policy, **options), trees)
    jax.effects_barrier()
    updates, propagates = found.updates["b"], policy == "propagate"
    np.testing.assert_array_equal(updates[0, :, 1], np.inf if propagates else 0.0)
    np.testing.assert_array_equal(updates[0, :, 4], 1.5)
    np.testing.assert_array_equal(updates[1], 1.0)
    assert not found.residuals.any()
    assert found.last.dropped.tolist() == [0 if propagates else 1] * 2
    assert found.last.withheld.tolist() == found.last.skipped.tolist() == [0, 0]


OVERFLOWING = {
    "gtopk": sc.allreduce.published.gtopk(density=0.25),
    "spardl": sc.allreduce.spardl(density=0.25),
    "ssar_recursive_double": sc.allreduce.published.ssar_recursive_double(capacity=4),
    "ring_sparse": sc.allreduce.published.ring_sparse(slack=1.0, fill=1.0),
}


@pytest.mark.parametrize("name", [x if x == "gtopk" else slow(x) for x in OVERFLOWING])
def test_after_a_sum_that_would_overflow_training_goes_on(name):
    """Two workers have the one half of the large entries, the others the other half.

    Each of them alone could be kept, but not beside a part of what the other one sends: a step
    that has them is skipped.
    """
    steps = np.ones((6, 4, 16), np.float32)
    steps[0] = 0
    steps[0, :2, :4] = steps[0, 2:, 4:8] = 2e38
    found = run(summing(0.25, OVERFLOWING[name], nonfinite="skip"), steps)
    assert found.last.skipped.tolist() == [1] * 4
    assert found.last.count.tolist() == [5] * 4
    assert not found.updates[0].any()
    assert (np.abs(found.updates[1:]).max((1, 2)) > 0).all()
    check_conservation(steps[1:], found.updates[1:], found.residuals[1:])
