"""Buffers of some leaves: buckets, which can overlap, and dense leaves next to sparse ones.

test_contract.py checks that a step is skipped with all of its leaves.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._state import _find
from tests.optax_ext.helpers import mesh, normal, refused, run, same, train
from tests.sparse_collectives import helpers

WORKERS, STEPS = 4, 5
PARAMS = {
    "a": jnp.zeros((6, 20)),
    "b": jnp.zeros((12, 10)),
    "c": jnp.zeros((30, 4), jnp.bfloat16),
    "d": jnp.zeros(5),
}
LABELS = {"a": "sparse", "b": "sparse", "c": "sparse", "d": "dense"}
topk_a = functools.partial(optax_ext.topk_a, 0.1, axis="w")


def gradients():
    return {
        key: normal((STEPS, WORKERS, *x.shape), i).astype(x.dtype)
        for i, (key, x) in enumerate(PARAMS.items())
    }


def test_a_bucket_may_begin_with_an_empty_leaf_or_have_no_other():
    given = {
        "a": normal((1, 2, 8)),
        "b": np.zeros((1, 2, 0, 3), np.float32),
        "c": normal((1, 2, 8)),
    }
    given = {**given, "d": np.zeros((1, 2, 0), np.float32)}
    found = run(optax_ext.bucketed(topk_a(), 3), given)
    assert found.updates["b"].shape == (1, 2, 0, 3)
    alone = run(optax_ext.bucketed(topk_a(), 2), {name: given[name] for name in "ac"})
    same({name: found.updates[name] for name in "ac"}, alone.updates)


@pytest.mark.slow
def test_buckets_are_buffers_of_their_own_the_last_leaves_first():
    given = gradients()
    given["b"][2, 1, 7] = np.nan
    found = run(optax_ext.bucketed(topk_a(), 3), given)
    # Only the bucket with a gradient that is not finite is skipped.
    assert [bucket.skipped[-1].max() for bucket in found.states.buckets] == [0, 1, 0]
    for names, bucket in zip(("cd", "b", "a"), found.states.buckets, strict=True):
        alone = run(topk_a(), {name: given[name] for name in names})
        same({name: found.updates[name] for name in names}, alone.updates)
        np.testing.assert_array_equal(bucket.residual, alone.state.residual)
        np.testing.assert_array_equal(bucket.info.selected, alone.state.info.selected)


@pytest.mark.slow
def test_bucketed_with_one_bucket_is_no_bucket():
    for tx in (topk_a(), optax_ext.dense(axis="w")):
        same(run(optax_ext.bucketed(tx, 1), gradients()).updates, run(tx, gradients()).updates)


def test_buckets_behind_multi_transform():
    """test_flush.py consolidates their residuals."""
    parts = {"sparse": optax_ext.bucketed(topk_a(), 2), "dense": optax.identity()}
    tx = optax.multi_transform(parts, LABELS | {"b": "dense", "d": "sparse"})
    state = optax_ext.init_state(tx, PARAMS, {"w": WORKERS})
    assert [s.layout.size for s in _find.get_states(state)] == [125, 120]


def waits(tx, layers=6, width=32):
    """How many products of the backward pass each exchange needs, and their total number."""
    on = mesh(4, "w")
    params = [jnp.full((width, width), 0.01)] * layers

    def loss(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    tx = optax.chain(tx, optax.sgd(0.1))
    step = optax_ext.make_train_step(loss, tx, on)
    lowered = step.lower(params, optax_ext.init_state(tx, params, on), jnp.ones((8, width)))
    text = lowered.compile().as_text()
    assert "is_scheduled=true" in text
    # For each instruction, its operands and, in turn, their operands.
    needs, exchanges, backward = {}, [], set()
    for line in text[text.index("\nENTRY") :].split("\n}")[0].splitlines()[2:]:
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        operands = set(re.findall(r"%[\w.\-]+", rest)) & needs.keys()
        needs[name] = operands.union(*(needs[operand] for operand in operands))
        # The all-reduce of the loss does not belong to the exchange.
        if re.search(r"\ball-gather(-start)?\(", line) and re.search(r"topk|cond|psum", line):
            exchanges.append(name)
        if re.search(r"transpose.*dot_general", line):
            backward.add(name)
    return [len(backward & needs[name]) for name in exchanges], len(backward)


@pytest.mark.slow
@pytest.mark.parametrize("alias", [optax_ext.topk_a, optax_ext.ok_topk])
def test_bucket_needs_only_the_backward_pass_of_its_layers(alias):
    """So XLA can overlap it with the rest; with one buffer the exchange needs every layer."""
    counts, whole = waits(alias(0.1, axis="w"))
    assert whole >= 5
    assert set(counts) == {whole}
    counts, whole = waits(optax_ext.bucketed(alias(0.1, axis="w"), 3))
    # In the order of the schedule, 1/3 of the layers at a time.
    assert counts == sorted(counts)
    assert len(set(counts)) == 3
    assert counts[0] <= whole // 3 + 1
    assert counts[-1] == whole


@pytest.mark.parametrize("buckets", [1, 2, 100])
def test_dense_buckets_give_the_bits_and_dtypes_of_one_allreduce_for_each_leaf(buckets):
    bucketed = optax_ext.dense(axis="w", buckets=buckets)
    same(*(run(tx, gradients()).updates for tx in (bucketed, optax_ext.dense(axis="w"))))


@pytest.mark.parametrize("buckets", [None, 1])
@pytest.mark.parametrize("dtype", [jnp.float16, "bfloat16"])
def test_dense_mean_in_half_precision_has_half_of_the_words(buckets, dtype):
    given, tx = gradients(), optax_ext.dense(axis="w", buckets=buckets, dtype=dtype)
    found, whole = (run(x, given) for x in (tx, optax_ext.dense(axis="w", buckets=buckets)))
    workers = jax.tree.leaves(given)[0].shape[1]
    for mean, exact in zip(*(jax.tree.leaves(x.updates) for x in (found, whole)), strict=True):
        assert mean.dtype == exact.dtype
        # Each share is rounded, and the mean to the dtype of its leaf.
        relative = max(workers * jnp.finfo(dtype).eps, jnp.finfo(mean.dtype).eps)
        scale = np.abs(np.asarray(exact, np.float32)).max()
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (mean, exact)), atol=float(relative) * scale
        )
    sizes = sum(x[0, 0].size for x in jax.tree.leaves(given))
    words = optax_ext.get_info(found.states).words[0, 0]
    assert words == pytest.approx(2 * (sizes / 2) * (workers - 1) / workers)


def test_dense_sum_that_float16_can_not_hold_is_a_mean_that_it_can():
    given = np.full((1, 4, 3), 6e4, np.float32)
    found = run(optax_ext.dense(axis="w", dtype="float16"), given)
    np.testing.assert_allclose(found.updates, 6e4, rtol=1e-3)


@pytest.mark.parametrize(
    ("buckets", "sizes"),
    [(None, [15, 35, 42, 48]), (1, [140]), (2, [50, 90]), (4, [50, 42, 48])],
)
def test_dense_bucket_waits_for_its_own_leaves_only(buckets, sizes):
    """The last layers first; their exchange needs no gradient of an earlier layer."""
    params = [jnp.zeros(size) for size in (48, 42, 35, 15)]
    tx = optax_ext.dense(axis="w", buckets=buckets)
    jaxpr = jax.make_jaxpr(lambda g: tx.update(g, tx.init(g))[0], axis_env=[("w", 4)])(params).jaxpr
    assert [variable.aval.size for variable in helpers.independent_psums(jaxpr)] == sizes


@pytest.mark.slow
def test_get_info_has_words_and_counts_of_all_that_is_exchanged():
    params, on = [jnp.ones((3, 4)), jnp.ones(5, jnp.bfloat16)], mesh(4, "w")
    dense, sparse = optax_ext.dense(axis="w"), optax_ext.topk_a(0.5, axis="w")
    both = optax.multi_transform({"sparse": sparse, "dense": dense}, ["sparse", "dense"])

    def loss(params, x):
        return jnp.mean(x) * sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in params)

    def info_of(tx):
        (_, start, _), *_, (_, state, _) = train(tx, loss, params, [jnp.ones(4)] * 2, on)
        assert int(optax_ext.get_info(start).words) == 0
        return optax_ext.get_info(state)

    info = info_of(optax.chain(optax.clip(10.0), dense, optax.adam(1e-3)))
    # 12 entries of a word, and 5 of half a word.
    assert float(info.words) == 2 * (12 + 2.5) * 3 / 4
    for found, delivered in ((info, 17), (info_of(both), 6 + 5)):
        assert int(found.delivered) == delivered
        assert set(np.ravel(found.selected).tolist()) == {delivered}


@pytest.mark.slow
@pytest.mark.parametrize(
    "labels",
    [LABELS, lambda params: LABELS, optax_ext.small_leaves(min_size=0)],
    ids=["tree", "function", "small_leaves"],
)
def test_dense_leaves_have_the_mean_and_the_others_are_as_if_they_were_alone(labels):
    found = run(topk_a(dense_leaves=labels), gradients())
    assert found.residuals.shape[-1] == 360
    mean = gradients()["d"].mean(1)
    np.testing.assert_allclose(found.updates["d"][:, 0], mean, rtol=1e-5, atol=1e-7)
    assert (found.state.info.selected == 36).all()
    others = {name: leaf for name, leaf in gradients().items() if name != "d"}
    alone = run(topk_a(), others)
    same({name: found.updates[name] for name in others}, alone.updates)
    words = found.state.info.words - alone.state.info.words
    np.testing.assert_allclose(words, 2 * 5 * (WORKERS - 1) / WORKERS, rtol=1e-5)


@pytest.mark.slow
def test_momentum_rate_and_dropped_entries_hold_for_dense_leaves_too():
    correction = optax_ext.momentum_correction(0.5, masking=True)
    options = {"correction": correction, "local": optax.scale(0.25), "nonfinite": "drop"}
    given = gradients()
    given["d"][2, 1, 3] = np.inf
    found = run(topk_a(dense_leaves=LABELS, **options), given)
    velocity, mean = np.zeros(5), np.where(np.isfinite(given["d"]), given["d"], 0).mean(1)
    for step in range(STEPS):
        velocity = 0.5 * velocity + 0.25 * mean[step]
        np.testing.assert_allclose(found.updates["d"][step, 0], velocity, rtol=1e-5, atol=1e-7)
    assert found.last.dropped.tolist() == [1] * WORKERS


def test_dense_leaves_only_are_the_dense_allreduce_and_have_the_words_of_one_sum():
    # These gradients have exact sums.
    given = {name: (leaf * 16).round() / 16 for name, leaf in gradients().items()}
    tx = optax_ext.ok_topk(0.1, axis="w", dense_leaves=dict.fromkeys(PARAMS, "dense"))
    found, dense = (run(each, given) for each in (tx, optax_ext.dense(axis="w")))
    for name, leaf in dense.updates.items():
        np.testing.assert_allclose(
            found.updates[name].astype(np.float32), leaf.astype(np.float32), rtol=1e-2
        )  # dense() adds bfloat16 up in bfloat16, whose steps are 1 / 256
    assert found.last.count.tolist() == [STEPS] * WORKERS
    # The words of each step, not of all steps so far.
    np.testing.assert_allclose(found.state.info.words, 2 * 365 * (WORKERS - 1) / WORKERS)


def test_labels_hold_for_all_below_them_and_for_multi_transform_as_well():
    params = {"layer": {"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}, "head": jnp.zeros(3)}
    tx = topk_a(dense_leaves={"layer": "sparse", "head": "dense"})
    assert optax_ext.init_state(tx, params, {"w": 2}).layout.dense == (True, False, False)
    parts = {"sparse": optax.sgd(1.0), "dense": optax.set_to_zero()}
    tx = optax.multi_transform(parts, optax_ext.small_leaves(min_size=50))
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_dense_leaves_velocity_moves_to_other_workers_and_other_labels_do_not():
    def state(workers, labels=LABELS):
        tx = topk_a(dense_leaves=labels, correction=optax_ext.momentum_correction(0.5))
        return optax_ext.init_state(tx, PARAMS, {"w": workers})

    old = state(4)
    velocity = np.random.default_rng(0).integers(-8, 8, old.dense_velocity.shape).astype("f4")
    moved = optax_ext.reshard(old._replace(dense_velocity=jnp.asarray(velocity)), state(3))
    assert moved.dense_velocity.shape == (3, 5)
    np.testing.assert_array_equal(np.asarray(moved.dense_velocity).sum(0), velocity.sum(0))
    message = r"params\['b'\] is sparse in one state and dense in the"
    refused(message, optax_ext.reshard, old, state(3, {**LABELS, "b": "dense"}))
