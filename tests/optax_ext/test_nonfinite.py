"""What is not finite, by policy: a gradient, a sum over the workers, an update of few bits.

Each cell of the table in the docstring of ``sparse_allreduce``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests import jax_internals
from tests.optax_ext.test_momentum_correction import STEPS, WORKERS, gradients, run

LARGE = np.float32(3e38)
AXES = ("node", "device")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def spoiled():
    bad = gradients()
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


def select_and_sum(density, **options):
    selector = sc.select.topk(density=density)
    return optax_ext.sparse_allreduce(selector, plain_sum(), axis="w", **options)


# A gradient.


@pytest.mark.slow
@pytest.mark.parametrize("correction", [None, optax_ext.momentum_correction(0.9, masking=False)])
def test_dropped_entries_are_as_if_they_had_not_been(correction):
    tx = optax_ext.topk_a(0.1, axis="w", nonfinite="drop", correction=correction)
    state, (updates, (residuals, velocities, _)) = run(tx, spoiled())
    assert state.dropped.tolist() == [3] * WORKERS
    assert state.skipped.tolist() == [0] * WORKERS
    assert state.count.tolist() == [STEPS] * WORKERS
    assert np.isfinite(updates).all()
    if correction is None:
        good = np.where(np.isfinite(spoiled()), spoiled(), 0).sum(1, dtype=np.float64)
        applied = WORKERS * updates[:, 0].sum(0, dtype=np.float64)
        np.testing.assert_allclose(applied + residuals[-1].sum(0), good.sum(0), atol=1e-5)
    else:
        assert np.isfinite(velocities).all()
        np.testing.assert_array_equal(velocities[2, 1, 0, 7], velocities[1, 1, 0, 7])


@pytest.mark.slow
def test_a_dropped_entry_does_not_stay_in_a_local_transformation():
    """The average of the gradients that it keeps would be NaN for good."""
    tx = optax_ext.topk_a(0.1, axis="w", nonfinite="drop", local=optax.ema(0.9, debias=False))
    state, (updates, (residuals, _, _)) = run(tx, spoiled())
    good = np.where(np.isfinite(spoiled()), spoiled(), 0)
    average, accumulated = np.zeros((WORKERS, good.shape[-1])), 0.0
    for gradient in good:
        average = 0.9 * average + 0.1 * gradient
        accumulated = accumulated + average.sum(0)
    applied = WORKERS * updates[:, 0].sum(0, dtype=np.float64)
    np.testing.assert_allclose(applied + residuals[-1].sum(0), accumulated, atol=1e-5)
    assert state.dropped.tolist() == [3] * WORKERS


@pytest.mark.slow
def test_a_skipped_step_leaves_the_velocity():
    tx = optax_ext.dgc(0.1, axis="w", dense_steps=1)
    state, (updates, (residuals, velocities, _)) = run(tx, spoiled())
    assert state.skipped.tolist() == [2] * WORKERS
    for step in (2, 4):
        assert (updates[step] == 0).all()
        np.testing.assert_array_equal(residuals[step], residuals[step - 1])
        np.testing.assert_array_equal(velocities[step], velocities[step - 1])


@pytest.mark.slow
def test_a_skipped_step_leaves_the_state_of_a_local_transformation():
    schedule = optax.piecewise_constant_schedule(1.0, {2: 0.25})
    tx = optax_ext.topk_a(1.0, axis="w", local=optax.scale_by_schedule(schedule))
    state, (updates, _) = run(tx, spoiled())
    assert state.local.count.tolist() == [[STEPS - 2]] * WORKERS
    # The third step of the schedule is the fourth of the run.
    for step, rate in ((0, 1.0), (1, 1.0), (3, 0.25), (5, 0.25)):
        np.testing.assert_allclose(
            updates[step, 0], rate * gradients()[step].mean(0), rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_propagate_hands_on_what_is_not_finite():
    _, (updates, _) = run(optax_ext.topk_a(0.1, axis="w", nonfinite="propagate"), spoiled())
    assert np.isnan(updates[2, :, 7]).all()
    assert np.isinf(updates[2, :, 9]).all()


def raised(step):
    """A call in which a host callback raises the error of a policy."""
    try:
        with pytest.raises(Exception, match="step 1: the gradient of some worker"):  # noqa: B017, PT012
            jax.block_until_ready(step())
            jax.effects_barrier()
    finally:
        jax_internals.forget_failed_callbacks()


def test_raise_on_a_mesh():
    mesh = jax.make_mesh((8,), ("w",), axis_types=(AxisType.Auto,))
    tx = optax_ext.topk_a(0.1, axis="w", nonfinite="raise")
    state = optax_ext.init_state(tx, jnp.zeros(40), mesh)
    specs = optax_ext.state_specs(state)
    step = jax.jit(
        jax.shard_map(
            lambda s, g: tx.update(g[0], s),
            mesh=mesh,
            in_specs=(specs, P("w")),
            out_specs=(P(), specs),
        )
    )
    good = np.ones((8, 40), np.float32)
    _, state = step(state, good)
    jax.effects_barrier()
    bad = good.copy()
    bad[3, 5] = np.nan
    raised(lambda: step(state, bad))


@pytest.mark.parametrize("policy", [slow("skip"), slow("drop"), "propagate"])
def test_the_sum_of_gradient_and_residual(policy):
    """Worker 0 keeps 1e38 at index 2, since index 3 is larger, and gets 3e38 more."""
    given = np.zeros((2, 2, 4), np.float32)
    given[0, 0, 2], given[0, 0, 3] = 1e38, 2e38  # at density 1/4 only index 3 is sent
    given[1, 0, 2] = LARGE
    tx = select_and_sum(0.25, nonfinite=policy)
    state, (updates, (residuals, _, _)) = run(tx, given, axis_size=2)
    assert residuals[0, 0].tolist() == [0, 0, np.float32(1e38), 0]
    assert np.isfinite(residuals).all()
    if policy == "propagate":
        assert np.isinf(updates[1, :, 2]).all()
    else:
        assert not updates[1].any() or policy == "drop"
        assert np.isfinite(updates).all()
    assert state.skipped.tolist() == [policy == "skip"] * 2
    assert state.dropped.tolist() == [policy == "drop"] * 2
    if policy == "skip":
        np.testing.assert_array_equal(residuals[1], residuals[0])
    if policy == "drop":
        # The increment is left out, and what was there is sent.
        np.testing.assert_array_equal(updates[1], [[0, 0, np.float32(1e38) / 2, 0]] * 2)


# The sum of finite entries.


def check_conservation(given, updates, residuals, workers):
    """In float64, where nothing of this overflows: exact up to a rounding of each step."""
    before = np.zeros(given.shape[-1])
    for step, gradient in enumerate(given):
        after = residuals[step].astype(np.float64).sum(0)
        total = workers * updates[step, 0].astype(np.float64) + after
        acc = before + gradient.astype(np.float64).sum(0)
        np.testing.assert_allclose(total, acc, rtol=1e-6)
        before = after


def large_sums():
    """Index 3 is too large for a sum of two workers, until both have taken 2e38 back."""
    given = np.zeros((3, 2, 8), np.float32)
    given[0, :, 3], given[0, :, 5] = LARGE, (1.0, 3.0)
    given[1, :, 6] = 2.0
    given[2, :, 3] = -2e38
    return given


@pytest.mark.parametrize("policy", [slow("skip"), "drop", slow("raise")])
def test_a_sum_that_overflows_stays_with_the_workers(policy):
    given = large_sums()
    state, (updates, (residuals, _, _)) = run(
        select_and_sum(0.25, nonfinite=policy), given, axis_size=2
    )
    jax.effects_barrier()
    assert np.isfinite(updates).all()
    assert np.isfinite(residuals).all()
    np.testing.assert_array_equal(residuals[:2, :, 3], np.full((2, 2), LARGE))
    np.testing.assert_array_equal(updates[:2, :, 3], 0)
    # The others are delivered meanwhile, and the entry itself as soon as its sum is finite.
    np.testing.assert_array_equal(updates[0, :, 5], 2.0)
    np.testing.assert_array_equal(updates[1, :, 6], 2.0)
    np.testing.assert_allclose(updates[2, :, 3], 1e38, rtol=1e-6)
    check_conservation(given, updates, residuals, 2)
    assert state.withheld.tolist() == [2, 2]
    assert state.skipped.tolist() == state.dropped.tolist() == [0, 0]
    assert state.count.tolist() == [3, 3]


@pytest.mark.slow
def test_a_sum_that_overflows_reaches_the_update_by_option():
    tx = select_and_sum(0.25, nonfinite="propagate")
    state, (updates, (residuals, _, _)) = run(tx, large_sums()[:1], axis_size=2)
    assert np.isinf(updates[0, :, 3]).all()
    assert not residuals.any()
    assert state.withheld.tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange",
    [
        sc.allreduce.topk_a(),
        sc.allreduce.dense(),
        sc.allreduce.dsar_split_allgather(),
    ],
    ids=["topk_a", "dense", "dsar"],
)
def test_after_a_dense_total_that_would_overflow_training_goes_on(exchange):
    """Whether the allreduce keeps its sums in range by itself or not."""
    given = large_sums()
    tx = optax_ext.sparse_allreduce(sc.select.topk(density=0.25), exchange, axis="w")
    state, (updates, (residuals, _, _)) = run(tx, given, axis_size=2)
    assert np.isfinite(updates).all()
    assert np.isfinite(residuals).all()
    np.testing.assert_array_equal(updates[0, :, 5], 2.0)
    np.testing.assert_array_equal(updates[1, :, 6], 2.0)
    check_conservation(given, updates, residuals, 2)
    assert state.count.tolist() == [3, 3]
    assert state.skipped.tolist() == state.dropped.tolist() == [0, 0]


def simulated_nodes(tx, given):
    """Updates, sums over the nodes of the residuals of a node, and states."""
    shape = given.shape[1:3]

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state.residual[0])

        return jax.lax.scan(step, tx.init(jax.tree.map(lambda x: x[0], gradients)), gradients)

    simulate = sc.simulate(train, axis=AXES, axis_size=shape, in_axes=1, out_axes=(0, 1))
    state, (updates, residuals) = jax.tree.map(np.asarray, simulate(given))
    return state, updates, residuals.reshape(len(given), shape[0], -1)[..., : given.shape[-1]]


@pytest.mark.slow
def test_a_sum_between_nodes_that_overflows_stays_with_their_shards():
    given = np.zeros((3, 2, 2, 8), np.float32)
    # 3e38 in each node, and more than float32 holds in both.
    given[0, ..., 1], given[0, ..., 6] = 1.5e38, 1.0
    given[2, ..., 1] = -1e38
    exchange = sc.allreduce.hierarchical(inner_axis="device", outer=plain_sum())
    tx = optax_ext.sparse_allreduce(sc.select.topk(density=0.5), exchange, axis=AXES)
    state, updates, residuals = simulated_nodes(tx, given)
    assert np.isfinite(updates).all()
    assert np.isfinite(residuals).all()
    assert (updates[0, ..., 6] == 1).all()
    np.testing.assert_allclose(updates[2, ..., 1], 0.5e38, rtol=1e-6)
    check_conservation(given.reshape(3, 4, 8), updates[:, 0], residuals, 4)
    # Of all shards, also of those in which nothing was withheld.
    assert (state.withheld == 2).all()


@pytest.mark.parametrize(
    ("where", "policy"),
    [
        slow("leaf", "skip"),
        ("leaf", "drop"),
        slow("leaf", "raise"),
        slow("leaf", "propagate"),
        slow("steps", "skip"),
        slow("steps", "drop"),
        slow("steps", "raise"),
        slow("steps", "propagate"),
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
    tx = optax_ext.topk_a(1.0, axis="w", nonfinite=policy, **options)

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates["b"], state.residual)

        return jax.lax.scan(step, tx.init(jax.tree.map(lambda x: x[0], gradients)), gradients)

    simulate = sc.simulate(train, axis="w", axis_size=2, in_axes=1, out_axes=(0, 1))
    state, (updates, residuals) = jax.tree.map(np.asarray, simulate(trees))
    jax.effects_barrier()
    propagates = policy == "propagate"
    np.testing.assert_array_equal(updates[0, :, 1], np.inf if propagates else 0.0)
    np.testing.assert_array_equal(updates[0, :, 4], 1.5)
    np.testing.assert_array_equal(updates[1], 1.0)
    assert not residuals.any()
    assert state.dropped.tolist() == [0 if propagates else 1] * 2
    assert state.withheld.tolist() == state.skipped.tolist() == [0, 0]


# An update of 16 bits.


def tree_of(dtypes, size=16):
    return {f"{i}_{dtype}": jnp.zeros(size, dtype) for i, dtype in enumerate(dtypes)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "drop", "raise", "propagate"])
def test_a_float16_leaf_whose_residual_grows_beyond_it(policy):
    """Of 16 equal entries one is sent at each step, so that the last has waited for 15."""
    given = np.full((20, 2, 16), 2e4, np.float16)
    tx = optax_ext.ok_topk(1 / 16, axis="w", nonfinite=policy)
    state, (updates, (residuals, _, _)) = run(tx, given, axis_size=2)
    jax.effects_barrier()
    assert updates.dtype == np.float16
    assert np.isfinite(residuals).all()
    if policy == "propagate":
        assert np.isinf(updates).any()
        assert state.withheld.tolist() == [0, 0]
        return
    assert np.isfinite(updates).all()
    assert updates.max() == np.finfo(np.float16).max
    # Integers, of which nothing is rounded.
    acc = given.astype(np.float64).sum(1).cumsum(0)
    kept = residuals.astype(np.float64).sum(1)
    np.testing.assert_array_equal(2 * updates[:, 0].astype(np.float64).cumsum(0) + kept, acc)
    saturated = (updates[:, 0] == np.finfo(np.float16).max).sum()
    assert state.withheld.tolist() == [saturated] * 2
    assert state.skipped.tolist() == [0, 0]


EXCHANGES = {
    "topk_a": sc.allreduce.topk_a(),
    "dsar": sc.allreduce.dsar_split_allgather(),
    "ok_topk": sc.allreduce.ok_topk(density=0.1),
    "ok_topk, bf16": sc.allreduce.ok_topk(density=0.1, codec=sc.wire.bf16()),
    "hierarchical topk_a": sc.allreduce.hierarchical(
        inner_axis="device", outer=sc.allreduce.topk_a()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "name"),
    [
        (("float16",), "topk_a"),
        (("bfloat16",), "dsar"),
        (("float16", "float32", "bfloat16", "bfloat16"), "ok_topk"),
        (("float32", "bfloat16", "float16"), "ok_topk, bf16"),
        (("float16", "float32", "bfloat16", "bfloat16"), "hierarchical topk_a"),
    ],
)
def test_what_a_narrow_leaf_rounds_off_stays_in_the_residuals(dtypes, name):
    steps, size = 6, 23
    params = tree_of(dtypes, size)
    nodes = name.startswith("hierarchical")
    shape = (3, 2) if nodes else (3,)
    rng = np.random.default_rng(0)
    given = {
        key: np.clip(2e4 * rng.standard_normal((steps, *shape, size)), -6e4, 6e4).astype(leaf.dtype)
        for key, leaf in params.items()
    }
    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.1), EXCHANGES[name], axis=AXES if nodes else "w"
    )

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state.residual[0])

        return jax.lax.scan(step, tx.init(params), gradients)[1]

    axis = {"axis": AXES if nodes else "w", "axis_size": shape}
    if not nodes:
        axis["axis_size"] = shape[0]
    updates, residuals = sc.simulate(train, **axis, in_axes=1, out_axes=1)(given)
    lead, workers = (steps, *shape), int(np.prod(shape))

    def flat(tree):
        leaves = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
        return np.concatenate(leaves, -1).reshape(steps, workers, -1)

    for leaf, like in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        assert leaf.dtype == like.dtype
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
    applied, n = flat(updates), size * len(dtypes)
    assert (applied == applied[:, :1]).all()
    kept = np.asarray(residuals, np.float64)
    # The shards of a node side by side.
    kept = kept.reshape(steps, lead[1], -1)[..., :n].sum(1)
    before = np.concatenate([np.zeros((1, n)), kept[:-1]])
    acc = before + flat(given).sum(1)
    scale = np.abs(before) + np.abs(flat(given)).sum(1)
    # Of float32; what bfloat16 rounds off is up to 2**-9 of an update.
    assert (np.abs(workers * applied[:, 0] + kept - acc) <= 4e-6 * scale).all()
    exact = before + flat(given).sum(1)
    rounded = (applied[:, 0] != 0) & (np.abs(kept) > 0)
    assert rounded.any() or dtypes == ("float32",)
    assert np.abs(exact).max() > 2e4


def test_a_narrow_leaf_that_is_dense_saturates():
    given = np.full((1, 2, 4), 6e4, np.float16)
    for policy, expected in (("skip", np.finfo(np.float16).max), ("propagate", np.inf)):
        tx = optax_ext.topk_a(
            0.5, axis="w", dense_leaves="dense", local=optax.scale(2.0), nonfinite=policy
        )
        state, (updates, _) = run(tx, given, axis_size=2)
        np.testing.assert_array_equal(updates, np.full((1, 2, 4), expected, np.float16))
        assert state.skipped.tolist() == [0, 0]


OVERFLOWING = {
    "gtopk": sc.allreduce.gtopk(density=0.25),
    "spardl": sc.allreduce.spardl(density=0.25),
    "ssar_recursive_double": sc.allreduce.ssar_recursive_double(capacity=4),
    "ring_sparse": sc.allreduce.ring_sparse(slack=1.0, fill=1.0),
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
    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.25), OVERFLOWING[name], axis="w", nonfinite="skip"
    )
    state, (updates, (residuals, _, _)) = run(tx, steps, axis_size=4)
    assert state.skipped.tolist() == [1] * 4
    assert state.count.tolist() == [5] * 4
    assert np.isfinite(updates).all()
    assert np.isfinite(residuals).all()
    assert (np.abs(updates[1:]).max((1, 2)) > 0).all()
    applied = 4 * updates[:, 0].sum(0, dtype=np.float64)
    kept = residuals[-1].sum(0, dtype=np.float64)
    np.testing.assert_allclose(applied + kept, steps[1:].sum((0, 1), dtype=np.float64), rtol=1e-6)
