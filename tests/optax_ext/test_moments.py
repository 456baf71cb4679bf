"""Second moments by row and column, or by row: against NumPy, in steps and in states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import shards
from tests.optax_ext.helpers import flat, mesh, normal, run, same, train

LOCAL, FORMS = optax_ext.scale_by_local_adam, ("factors", "rows")
B2, EPS = 0.9, 0.01
# For each shape, the axis along a row and the axis along a column.
MATRICES = {
    (4, 6): (1, 0),
    (6, 4): (1, 0),
    (5, 2, 6): (2, 0),  # A stack of two, between the others.
    (3, 3, 3): (2, 1),
    (1, 4, 3): (2, 1),
}
NO_MATRICES = [(), (7,), (1, 4), (4, 1), (1, 1)]
GIVEN = {str(shape): normal((5, 2, *shape), i) for i, shape in enumerate([*MATRICES, *NO_MATRICES])}


def scaled(moments, gradients, axes=None, b2=B2, eps=EPS):
    """The updates of all steps, and the moments after the last one."""
    along, across = axes or ((), ())
    rows = columns = 0.0
    made = []
    for t, g in enumerate(np.asarray(gradients, np.float64), 1):
        rows = b2 * rows + (1 - b2) * (g**2).mean(along, keepdims=True)
        columns = b2 * columns + (1 - b2) * (g**2).mean(across, keepdims=True)
        v = rows
        if moments == "factors" and axes:
            v = rows * columns / rows.mean(across, keepdims=True)
        update = g / (np.sqrt(v / (1 - b2**t)) + eps)
        if moments == "factors" and axes:
            root_mean_square = np.sqrt((update**2).mean((along, across), keepdims=True))
            update = update / np.maximum(1, root_mean_square / 2)
        made.append(update)
    return made, rows, columns


@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.one_in(2)
def test_moments_of_each_form_are_what_they_say_for_all_shapes(moments):
    found = run(LOCAL(B2, EPS, axis="w", moments=moments), GIVEN)
    for shape in (*MATRICES, *NO_MATRICES):
        name, axes = str(shape), MATRICES.get(shape)
        for worker in range(2):
            expected, rows, columns = scaled(moments, GIVEN[name][:, worker], axes)
            np.testing.assert_allclose(found.updates[name][:, worker], expected, rtol=2e-5)
            nu = found.states.nu[name][-1, worker]
            np.testing.assert_allclose(nu, rows, rtol=1e-5)
            assert nu.shape == np.shape(rows)
            if moments == "factors" and axes:
                kept = found.states.columns[name][-1, worker]
                np.testing.assert_allclose(kept, columns, rtol=1e-5)


@pytest.mark.parametrize("moments", FORMS)
def test_moments_have_no_bias_at_first_and_move_nothing_without_a_gradient(moments):
    """The factors are exact for squares that are a product of rows and columns."""
    rows, columns = np.array([1.0, 0.0, 3.0]), np.array([2.0, 0.5, 0.0, 1.0])
    g = np.outer(rows, columns if moments == "factors" else np.ones(4)).astype(np.float32)
    tx = LOCAL(eps=1e-8, moments=moments)
    updates, state = tx.update(jnp.asarray(g), tx.init(jnp.zeros((3, 4))))
    np.testing.assert_allclose(updates, np.sign(g), rtol=1e-5)
    nothing, _ = tx.update(jnp.zeros((3, 4)), tx.init(jnp.zeros((3, 4))))
    np.testing.assert_array_equal(nothing, 0.0)
    assert sum(x.size for x in jax.tree.leaves(state)[1:]) == (7 if moments == "factors" else 3)


def test_means_over_the_workers_are_those_of_their_squares():
    given = normal((4, 3, 5, 6))
    found = run(LOCAL(B2, axis="w", average_every=4, moments="factors"), given).states
    expected = sum((1 - B2) * B2 ** (3 - t) * given[t].astype(np.float64) ** 2 for t in range(4))
    for worker in range(3):
        mean = expected.mean(axis=0)
        np.testing.assert_allclose(found.nu[3, worker], mean.mean(1, keepdims=True), rtol=1e-5)
        np.testing.assert_allclose(found.columns[3, worker], mean.mean(0, keepdims=True), rtol=1e-5)


SHAPES = {"a": (8, 16), "b": (16,)}
PARAMS = {name: normal(shape, 7) for name, shape in SHAPES.items()}
TARGETS = normal((4, 8, sum(int(np.prod(shape)) for shape in SHAPES.values())), 3)
SPARSE = functools.partial(optax_ext.sparse_adamw, 0.05, axis="data", eps=0.1)


def loss_fn(params, batch):
    """Half of the squared distance to a target of the worker."""
    where = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(params)])
    return 0.5 * jnp.sum((where - batch[0]) ** 2)


@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.one_in(2)
def test_sparse_adamw_of_all_entries_on_eight_devices(moments):
    tx = SPARSE(
        density=1.0,
        moments=moments,
        limit=None,
        gain=1.0,
        weight_decay=0.0,
        allreduce=sc.allreduce.partitioned_topk(),
    )
    states = train(tx, loss_fn, PARAMS, TARGETS, mesh(8))
    w, seen = flat(PARAMS), []
    for target, (params, _, _) in zip(TARGETS, states[1:], strict=True):
        seen.append(w - target)
        step = np.zeros((8, w.size))
        for worker in range(8):
            g = np.array([of_step[worker] for of_step in seen])
            matrix, _, _ = scaled(moments, g[:, :128].reshape(-1, 8, 16), (1, 0), 0.999, 0.1)
            vector, _, _ = scaled(moments, g[:, 128:], None, 0.999, 0.1)
            step[worker] = np.concatenate([matrix[-1].ravel(), vector[-1]])
        w = w - 0.05 * step.mean(axis=0)
        np.testing.assert_allclose(flat(params), w, rtol=1e-4, atol=1e-5)
    kept = optax_ext.get_state(states[-1][1]).local[0]
    assert kept.nu["a"].shape == (8, 8, 1)
    assert kept.nu["b"].shape == (8, 16)


@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.parametrize("nonfinite", ["skip", "drop"])
@pytest.mark.one_in(2)
def test_moments_do_not_take_what_is_no_gradient(moments, nonfinite):
    """This includes finite values whose squares are not finite."""
    given = TARGETS.copy()
    given[0, 1, 3], given[1, 2, 130], given[2, 3, 5] = np.nan, 1e25, -np.inf
    tx = SPARSE(moments=moments, nonfinite=nonfinite)
    params, state, _ = train(tx, loss_fn, PARAMS, given, mesh(8))[-1]
    state = optax_ext.get_state(state)
    assert (int(state.skipped), int(state.dropped)) == ((3, 0) if nonfinite == "skip" else (0, 3))
    for x in jax.tree.leaves((params, state.local, state.residual)):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.parametrize("large", [1e4, 1e12, 2.0**62])
def test_moments_with_one_far_larger_entry_bound_all_updates(moments, large):
    """In a matrix of a stack, which shares nothing with the others."""
    given = np.ones((30, 1, 2, 8, 16), np.float32)
    given[0, 0, 1, 2, 3] = large
    updates = run(LOCAL(axis="w", moments=moments), given).updates[:, 0]
    root_mean_square = np.sqrt((updates.astype(np.float64) ** 2).mean((-1, -2)))
    assert root_mean_square.max() <= 2 * (1 + 1e-5)
    np.testing.assert_allclose(updates[:, 0], 1.0, rtol=1e-5)


TENSOR = {"a": PartitionSpec(None, "model"), "b": PartitionSpec("model")}


@pytest.mark.parametrize("moments", FORMS)
@pytest.mark.one_in(2)
def test_sharded_parameters_have_the_moments_of_whole_leaves(moments):
    """At a density of 1 a step does not depend on how the entries are dealt out."""
    tx = SPARSE(density=1.0, moments=moments, allreduce=sc.allreduce.partitioned_topk())
    on = mesh((2, 4), ("data", "model"))
    whole = train(tx, loss_fn, PARAMS, TARGETS[:, :2], mesh(2))[-1]
    split = train(tx, loss_fn, shards.placed(PARAMS, on, TENSOR), TARGETS[:, :2], on)[-1]
    local = [optax_ext.get_state(state).local for _, state, _ in (whole, split)]
    for one, other in ((whole[0], split[0]), local):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other
        )
    assert split[0]["a"].sharding.spec == TENSOR["a"]
    shards.same_on_devices(split[:2])


def test_moments_with_another_number_of_workers_and_like_the_parameters():
    tx = SPARSE(moments="factors")
    _, state, _ = train(tx, loss_fn, PARAMS, TARGETS[:2, :4], mesh(4))[-1]
    moved = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(2)))
    same(moved.local, jax.tree.map(lambda x: x[:2], state.local))
    found = optax.tree.map_params(tx, lambda _, name: name, state, {"a": "a", "b": "b"})
    assert found.local[0].columns == found.local[0].nu == {"a": "a", "b": "b"}


def test_moments_with_a_rate_of_inject_hyperparams():
    tx = optax.inject_hyperparams(optax_ext.sparse_adamw)(0.05, axis="data", moments="factors")
    params, _, loss = train(tx, loss_fn, PARAMS, TARGETS[:1], mesh(8))[-1]
    assert np.isfinite(loss)
    assert np.isfinite(flat(params)).all()
