"""The dense mean by leaf or in buckets, and leaves that go dense beside the buffer of the others.

That a step is skipped with all of its leaves is held by test_contract.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import mesh, run, same
from tests.sparse_collectives import helpers

WIDTHS = (8, 6, 7, 5, 3)
SHAPES = list(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))


def loss(params, x):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return jnp.mean(x**2)


def problem():
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SHAPES]
    return params, jnp.asarray(rng.standard_normal((4, 2, WIDTHS[0])), jnp.float32)


def mean_gradient(tx):
    def step(params, x):
        return tx.update(jax.grad(loss)(params, x), tx.init(params))[0]

    return step


@pytest.mark.parametrize("buckets", [None, 1, 2, 100])
def test_buckets_give_the_bits_of_one_allreduce_for_each_leaf(buckets):
    params, x = problem()
    means = [
        sc.simulate(mean_gradient(tx), axis="w", axis_size=4, in_axes=(None, 0))(params, x)
        for tx in (optax_ext.dense(axis="w", buckets=buckets), optax_ext.dense(axis="w"))
    ]
    same(*means)


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        (None, [[3], [2], [1], [0]]),
        (1, [[3, 2, 1, 0]]),
        (2, [[3, 2], [1, 0]]),
        (4, [[3, 2], [1], [0]]),
    ],
)
def test_a_bucket_waits_for_its_own_leaves_only(buckets, expected):
    """The last layers first; their exchange needs no gradient of an earlier layer."""
    params, _ = problem()
    tx = optax_ext.dense(axis="w", buckets=buckets)
    jaxpr = jax.make_jaxpr(lambda g: tx.update(g, tx.init(g))[0], axis_env=[("w", 4)])(params).jaxpr
    sums = helpers.independent_psums(jaxpr)
    sizes = [sum(params[i].size for i in bucket) for bucket in expected]
    assert [variable.aval.size for variable in sums] == sizes


def test_leaves_of_different_dtypes_are_not_joined():
    params = [jnp.ones(4, jnp.bfloat16), jnp.ones(4), jnp.ones(4)]
    tx = optax_ext.dense(axis="w", buckets=1)
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2, in_axes=None)
    assert [leaf.dtype for leaf in step(params)] == [leaf.dtype for leaf in params]


@pytest.mark.slow
def test_get_info_has_words_and_counts_of_all_that_is_exchanged():
    params = [jnp.ones((3, 4)), jnp.ones(5, jnp.bfloat16)]
    dense, sparse = optax_ext.dense(axis="w"), optax_ext.topk_a(0.5, axis="w")
    parts = {"sparse": sparse, "dense": dense}
    both = optax.multi_transform(parts, ["sparse", "dense"])

    def loss(params, x):
        return jnp.mean(x) * sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in params)

    def info_of(tx):
        state = optax_ext.init_state(tx, params, mesh(4, "w"))
        assert int(optax_ext.get_info(state).words) == 0
        step = optax_ext.make_train_step(loss, tx, mesh(4, "w"), donate=False)
        for _ in range(2):
            _, state, _ = step(params, state, jnp.ones(4))
        return optax_ext.get_info(state)

    info = info_of(optax.chain(optax.clip(10.0), dense, optax.adam(1e-3)))
    # 12 entries of a word, and 5 of half a word.
    assert float(info.words) == 2 * (12 + 2.5) * 3 / 4
    for found, delivered in ((info, 17), (info_of(both), 6 + 5)):
        assert int(found.delivered) == delivered
        assert set(np.ravel(found.selected).tolist()) == {delivered}


# Beside leaves that are sparsified.

WORKERS, STEPS = 4, 5
PARAMS = {"a": jnp.zeros((12, 10)), "bias": jnp.zeros(10), "b": jnp.zeros((8, 5), jnp.bfloat16)}
LABELS = {"a": "sparse", "bias": "dense", "b": "sparse"}


@functools.cache
def gradients():
    rng = np.random.default_rng(3)
    return {
        name: np.asarray(
            rng.integers(-64, 64, (STEPS, WORKERS, *leaf.shape)) / 16, np.dtype(leaf.dtype)
        )
        for name, leaf in PARAMS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "labels",
    [LABELS, lambda params: LABELS, optax_ext.small_leaves(min_size=0)],
    ids=["tree", "function", "small_leaves"],
)
def test_dense_leaves_have_the_mean_and_the_others_are_as_if_they_were_alone(labels):
    found = run(optax_ext.topk_a(0.1, axis="w", dense_leaves=labels), gradients())
    assert found.residuals.shape[-1] == 12 * 10 + 8 * 5
    mean = gradients()["bias"].mean(1)
    np.testing.assert_allclose(found.updates["bias"][:, 0], mean, rtol=1e-6)
    assert (found.state.info.selected == 16).all()
    others = {name: leaf for name, leaf in gradients().items() if name != "bias"}
    alone = run(optax_ext.topk_a(0.1, axis="w"), others)
    for name, leaf in alone.updates.items():
        np.testing.assert_array_equal(leaf, found.updates[name])
    words = found.state.info.words - alone.state.info.words
    np.testing.assert_allclose(words, 2 * 10 * (WORKERS - 1) / WORKERS, rtol=1e-5)


@pytest.mark.slow
def test_momentum_and_rate_hold_for_dense_leaves_too():
    correction = optax_ext.momentum_correction(0.5, masking=True)
    tx = optax_ext.topk_a(
        0.1, axis="w", dense_leaves=LABELS, correction=correction, local=optax.scale(0.25)
    )
    found = run(tx, gradients())
    velocity, mean = np.zeros(10), gradients()["bias"].mean(1)
    for step in range(STEPS):
        velocity = 0.5 * velocity + 0.25 * mean[step]
        np.testing.assert_allclose(found.updates["bias"][step, 0], velocity, rtol=1e-5)


@pytest.mark.slow
def test_dropped_entries_of_dense_leaves():
    given = {name: leaf.copy() for name, leaf in gradients().items()}
    given["bias"][2, 1, 3] = np.inf
    tx = optax_ext.topk_a(0.1, axis="w", dense_leaves=LABELS, nonfinite="drop")
    found = run(tx, given)
    assert found.last.dropped.tolist() == [1] * WORKERS
    expected = np.where(np.isfinite(given["bias"]), given["bias"], 0).mean(1)
    np.testing.assert_allclose(found.updates["bias"][:, 0], expected, rtol=1e-6)


def test_all_leaves_dense_is_the_dense_allreduce_and_has_the_words_of_one_sum():
    tx = optax_ext.ok_topk(0.1, axis="w", dense_leaves=dict.fromkeys(PARAMS, "dense"))
    found, dense = (run(each, gradients()) for each in (tx, optax_ext.dense(axis="w")))
    for name, leaf in dense.updates.items():
        np.testing.assert_allclose(
            found.updates[name].astype(np.float32), leaf.astype(np.float32), rtol=1e-2
        )  # dense() adds bfloat16 up in bfloat16, whose steps are 1 / 256
    assert found.last.count.tolist() == [STEPS] * WORKERS
    size = sum(leaf.size for leaf in PARAMS.values())
    # Of each step, not of all until then.
    np.testing.assert_allclose(found.state.info.words, 2 * size * (WORKERS - 1) / WORKERS)


def test_a_label_holds_for_all_below_it():
    params = {"layer": {"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}, "head": jnp.zeros(3)}
    tx = optax_ext.ok_topk(0.5, axis="w", dense_leaves={"layer": "sparse", "head": "dense"})
    state = optax_ext.init_state(tx, params, {"w": 2})
    assert state.layout.dense == (True, False, False)


def test_small_leaves_are_labels_for_multi_transform_as_well():
    tx = optax.multi_transform(
        {"sparse": optax.sgd(1.0), "dense": optax.set_to_zero()},
        optax_ext.small_leaves(min_size=50),
    )
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_states_with_other_dense_leaves_are_told_apart():
    def state(labels, workers=2):
        tx = optax_ext.topk_a(0.1, axis="w", dense_leaves=labels)
        return optax_ext.init_state(tx, PARAMS, {"w": workers})

    saved = optax_ext.checkpoint_metadata(state(LABELS))
    with pytest.raises(ValueError, match=r"dense: .*bias.* in the checkpoint, .*'b'.* here"):
        optax_ext.check_metadata(saved, state({**LABELS, "b": "dense"}))
    with pytest.raises(ValueError, match=r"params\['b'\] is sparse in one state and dense in the"):
        optax_ext.reshard(state(LABELS), state({**LABELS, "b": "dense"}, 3))


def test_the_velocity_of_dense_leaves_moves_to_other_workers():
    def state(workers):
        correction = optax_ext.momentum_correction(0.5)
        tx = optax_ext.topk_a(0.1, axis="w", dense_leaves=LABELS, correction=correction)
        return optax_ext.init_state(tx, PARAMS, {"w": workers})

    old = state(4)
    rng = np.random.default_rng(0)
    velocity = rng.integers(-8, 8, old.dense_velocity.shape).astype(np.float32)
    moved = optax_ext.reshard(old._replace(dense_velocity=jnp.asarray(velocity)), state(3))
    assert moved.dense_velocity.shape == (3, 10)
    np.testing.assert_array_equal(np.asarray(moved.dense_velocity).sum(0), velocity.sum(0))
