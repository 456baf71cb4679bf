"""Leaves that go dense beside the buffer that is sparsified.

That a step is skipped with all of its leaves is held by test_contract.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import mapped, mesh, run

WORKERS, STEPS = 4, 5
PARAMS = {"a": jnp.zeros((12, 10)), "bias": jnp.zeros(10), "b": jnp.zeros((8, 5), jnp.bfloat16)}
LABELS = {"a": "sparse", "bias": "dense", "b": "sparse"}


@functools.cache
def gradients(workers=WORKERS):
    rng = np.random.default_rng(3)
    return {
        name: np.asarray(
            rng.integers(-64, 64, (STEPS, workers, *leaf.shape)) / 16, np.dtype(leaf.dtype)
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
    for name, leaf in run(optax_ext.topk_a(0.1, axis="w"), others).updates.items():
        np.testing.assert_array_equal(leaf, found.updates[name])


@pytest.mark.slow
def test_all_dense_leaves_count_as_the_words_of_one_sum():
    labels = {"a": "dense", "bias": "dense", "b": "sparse"}
    tx = optax_ext.topk_a(0.1, axis="w", dense_leaves=labels, nonfinite="propagate")
    words = run(tx, gradients()).state.info.words
    np.testing.assert_allclose(words, 2 * 4 * (WORKERS - 1) + 2 * 130 * (WORKERS - 1) / WORKERS)


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
    assert found.state.dense_velocity.shape == (STEPS, WORKERS, 1, 10)


@pytest.mark.slow
def test_dropped_entries_of_dense_leaves():
    given = {name: leaf.copy() for name, leaf in gradients().items()}
    given["bias"][2, 1, 3] = np.inf
    tx = optax_ext.topk_a(0.1, axis="w", dense_leaves=LABELS, nonfinite="drop")
    found = run(tx, given)
    assert found.last.dropped.tolist() == [1] * WORKERS
    expected = np.where(np.isfinite(given["bias"]), given["bias"], 0).mean(1)
    np.testing.assert_allclose(found.updates["bias"][:, 0], expected, rtol=1e-6)


def test_all_leaves_dense_is_the_dense_allreduce():
    tx = optax_ext.ok_topk(
        0.1, axis="w", dense_leaves={"a": "dense", "bias": "dense", "b": "dense"}
    )
    found, dense = (run(each, gradients()) for each in (tx, optax_ext.dense(axis="w")))
    for name, leaf in dense.updates.items():
        np.testing.assert_allclose(
            found.updates[name].astype(np.float32), leaf.astype(np.float32), rtol=1e-2
        )  # dense() adds bfloat16 up in bfloat16, whose steps are 1 / 256
    assert found.last.count.tolist() == [STEPS] * WORKERS
    size = sum(leaf.size for leaf in PARAMS.values())
    # Of each step, not of all until then.
    np.testing.assert_allclose(found.state.info.words, 2 * size * (WORKERS - 1) / WORKERS)


@pytest.mark.slow
def test_on_a_mesh_through_a_checked_step_with_a_hierarchy():
    on = mesh((2, 4), ("n", "d"))
    tx = optax_ext.published.hitopk(
        0.1,
        axis=("n", "d"),
        inner_axis="d",
        dense_leaves=LABELS,
        correction=optax_ext.momentum_correction(0.5),
    )
    state = optax_ext.init_state(tx, PARAMS, on)
    given = jax.tree.map(lambda x: x[0], gradients(8))
    updates, state = mapped(tx, on, state)(given, state)
    np.testing.assert_allclose(updates["bias"], given["bias"].mean(0), rtol=1e-6)
    assert state.dense_velocity.shape == (8, 10)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"a": "sparse", "b": "dense"}, r"no label for params\['bias'\].*small_leaves"),
        ({"a": "sparse", "b": "dense", "bias": None}, r"no label for params\['bias'\]"),
        ({"a": "sparse", "b": "dense", "bias": "big"}, r"params\['bias'\] 'big'.*one of"),
        ({**LABELS, "c": "dense"}, r"label for params\['c'\], which is no leaf"),
    ],
)
def test_labels_that_do_not_fit(labels, message):
    tx = optax_ext.ok_topk(0.1, axis="w", dense_leaves=labels)
    with pytest.raises(ValueError, match=message):
        optax_ext.init_state(tx, PARAMS, {"w": 2})


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
