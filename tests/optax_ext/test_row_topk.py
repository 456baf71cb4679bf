"""ADTopk's selection with row_topk in training: every row of every leaf has an update each step.

test_contract.py has the tests for all transformations.
"""

import jax
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import in_loop, normal, refused, run, slow_but

DENSITY, WORKERS, STEPS = 0.05, 5, 12
# Rows of several widths, shorter and longer than 1 / density; a vector and a scalar are one row.
SHAPES = {"bias": (40,), "conv": (3, 3, 2, 8), "kernel": (24, 40), "scale": (), "tall": (90, 3)}
ADTOPK = sc.select.published.adtopk(density=DENSITY)


def exchange(allreduce):
    return optax_ext.sparse_allreduce(ADTOPK, allreduce, axis="w")


ROW_TOPK = exchange(sc.allreduce.row_topk(density=DENSITY))
TRANSFORMATIONS = {
    "row_topk": ROW_TOPK,
    "row_topk in buckets": optax_ext.bucketed(ROW_TOPK, 3),
    "ok_topk": exchange(sc.allreduce.ok_topk(density=DENSITY)),
}


def missing(updates):
    """How many rows of a leaf have no entry in a step, of all steps; the last axis numbers rows."""
    rows = updates.reshape(len(updates), -1, updates.shape[-1] if updates.ndim > 2 else 1)
    return int((~(rows != 0).any(axis=1)).sum())


@pytest.mark.parametrize("name", slow_but(["row_topk"], TRANSFORMATIONS))
@pytest.mark.slow
def test_rows_of_every_leaf_are_in_every_update(name):
    given = {leaf: normal((STEPS, WORKERS, *shape), 1) for leaf, shape in SHAPES.items()}
    # Leaves and workers differ by a factor of a thousand, and a worker has nothing to send.
    given["kernel"] *= 1e-3
    for gradients in given.values():
        gradients[:, 0] *= 1e3
        gradients[:, 1] = 0
    updates = run(TRANSFORMATIONS[name], given).updates
    for leaf in SHAPES:
        assert (updates[leaf] == updates[leaf][:, :1]).all()
    found = {leaf: missing(updates[leaf][:, 0]) for leaf in SHAPES}
    # A global selection from all rows together leaves out many.
    assert (sum(found.values()) > 100) if name == "ok_topk" else not any(found.values()), found


def test_rows_of_the_selector_along_another_axis_are_refused():
    selector = sc.select.published.adtopk(density=DENSITY, row_axis=0)
    refused(
        r"selector has row_axis=0 and the allreduce row_axis=-1.*both row_axis=0, or",
        optax_ext.sparse_allreduce,
        selector,
        sc.allreduce.row_topk(density=DENSITY),
        axis="w",
    )
    optax_ext.sparse_allreduce(selector, sc.allreduce.topk_a(), axis="w")


@pytest.mark.slow
def test_pmap_gives_the_updates_of_simulated_workers():
    given = {leaf: normal((3, 4, *shape), 2) for leaf, shape in SHAPES.items()}
    expected = run(ROW_TOPK, given).updates

    def steps(params, gradients):
        def step(state, gradient):
            updates, state = ROW_TOPK.update(gradient, state)
            return state, updates

        return jax.lax.scan(step, ROW_TOPK.init(params), gradients)[1]

    params = {leaf: np.zeros(shape, np.float32) for leaf, shape in SHAPES.items()}
    batches = {leaf: np.swapaxes(gradients, 0, 1) for leaf, gradients in given.items()}
    for leaf, updates in in_loop("pmap", steps)(params, batches).items():
        np.testing.assert_array_equal(updates, np.swapaxes(expected[leaf], 0, 1))
