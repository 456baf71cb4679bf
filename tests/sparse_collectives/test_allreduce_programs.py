"""The programs of the allreduces: platforms, a mesh of devices, and the largest n.

test_allreduce_contract.py compares their words with those that a step reports.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.test_allreduce_contract import (
    EACH,
    LIGHT,
    OVER_NODES,
    ROWS,
    SELECTOR,
    SIZE,
    traced,
)

# With a codec.
OK_TOPK = tuple(f"ok_topk, {codec}" for codec in table.LOSSY_CODECS)
CUDA_FAST = LIGHT | {"partitioned_topk, few bits", "dense", "dsar_split_allgather"}
CUDA_FAST |= {"partitioned_topk", "ssar_split_allgather, room for all"}


# (For the CPU the tests of the contract compile all of them.)
@pytest.mark.parametrize(
    ("row", "platform"),
    [
        ("topk_a", "cpu"),
        *((row, "cuda") for row in EACH if row in CUDA_FAST),
        *helpers.slow_rows(*((row, "cuda") for row in [*EACH, *OK_TOPK] if row not in CUDA_FAST)),
    ],
)
@pytest.mark.one_in(3)
def test_lowers_without_devices(row, platform):
    program = traced(row, 1000, 64, (16, 4) if row in OVER_NODES else None)
    assert "stablehlo" in program.lower(lowering_platforms=(platform,)).as_text()


ON_A_MESH = ("topk_a", "sparse_allgather", "gtopk", "spardl", "ssar_recursive_double", "row_topk")
ON_A_MESH += ("ssar_split_allgather, room for all", "ring_sparse", "dsar_split_allgather")
ON_A_MESH += OK_TOPK


@pytest.mark.parametrize(
    ("name", "check_vma", "workers"),
    [
        ("topk_a", False, 3),
        ("ssar_recursive_double", True, 1),
        # With three workers, recursive doubling folds one into another.
        *(
            pytest.param(name, check_vma, 3, marks=pytest.mark.slow)
            for name in ON_A_MESH
            for check_vma in (False, True)
            if (name, check_vma) != ("topk_a", False)
        ),
    ],
)
@pytest.mark.one_in(2)
def test_total_on_a_mesh_is_replicated(name, check_vma, workers):
    allreduce = ROWS[name].allreduce
    helpers.check_replicated_on_a_mesh(
        SELECTOR, allreduce, SIZE, check_vma=check_vma, workers=workers
    )


# Those with messages from one worker to another, and one with none.
MESSAGES = ("spardl", "gtopk", "ring_sparse", "ssar_recursive_double", "topk_a")
MESSAGES += ("ok_topk, as published",)


@pytest.mark.parametrize("way", ["mesh", "simulate"])
@pytest.mark.parametrize("name", helpers.slow_but(MESSAGES, table.ALLREDUCES))
@pytest.mark.one_in(4)
def test_two_axes_in_another_order_than_the_mesh(name, way):
    allreduce, axis, sizes = ROWS[name].allreduce, ("inner", "outer"), (3, 2)
    given = np.random.default_rng(0).standard_normal((6, SIZE)).astype(np.float32)

    def step(acc):
        state = allreduce.init(SIZE, 6)
        seen = allreduce.local_view(acc, state, axis=axis)
        coo, *_ = SELECTOR.select(seen, SELECTOR.init(seen.size))
        coo = allreduce.to_global(coo, SIZE, state, axis=axis)
        options = {"acc": acc} if allreduce.full_sums else {}
        total, undelivered, *_ = allreduce.reduce(coo, state, axis=axis, **options)
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        return total, undelivered.residual(acc, coo)

    if way == "simulate":
        results = sc.simulate(step, axis=axis, axis_size=sizes)(given.reshape(*sizes, SIZE))
    else:
        on, rows = helpers.mesh((2, 3), axis[::-1]), jax.sharding.PartitionSpec(axis)
        mapped = jax.shard_map(
            lambda acc: jax.tree.map(lambda x: x[None], step(acc[0])),
            mesh=on,
            in_specs=rows,
            out_specs=rows,
            check_vma=False,
        )
        results = jax.jit(mapped)(given)
    totals, residuals = (np.asarray(x, np.float64).reshape(6, SIZE) for x in results)
    np.testing.assert_array_equal(totals, totals[:1] + np.zeros_like(totals))
    exact = given.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(totals[0] + residuals.sum(axis=0), exact, atol=1e-5)


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_all_workers_draw_the_same_with_any_default_of_jax(kind):
    allreduce, selector = sc.allreduce.shared_random(density=0.2), sc.select.random_k(density=0.2)
    states = selector.init(SIZE), allreduce.init(SIZE, 3)

    def step(acc, states):
        drawn = selector.select(acc, states[0])[0].indices
        coo, *_ = SELECTOR.select(acc, SELECTOR.init(SIZE))
        return drawn, allreduce.reduce(coo, states[1], axis="w", acc=acc)[0].indices

    with jax.default_prng_impl(kind):
        # As in a training: each worker has a state of its own, and the key depends on it.
        each = jax.tree.map(lambda x: jnp.stack([x] * 3), states)
        for drawn in sc.simulate(step, axis="w", axis_size=3)(jnp.ones((3, SIZE)), each):
            np.testing.assert_array_equal(drawn, drawn[:1] + jnp.zeros_like(drawn))


LARGEST = 2**31 - 1
AT_THE_LARGEST = {
    **{name: {} for name in table.ALGORITHMS},
    "ok_topk, room for all": {"slack": math.inf},
    "ok_topk, no balance": {"balance": "never"},
}
TRACED_FOR_LONG = {"ok_topk", "ok_topk, room for all", "ok_topk, no balance"}
TRACED_FOR_LONG |= {"spardl", "ring_sparse"}


@pytest.mark.parametrize("workers", [8, *helpers.slow(1000)])
@pytest.mark.parametrize(
    "name", helpers.slow_but(AT_THE_LARGEST.keys() - TRACED_FOR_LONG, AT_THE_LARGEST)
)
def test_message_sizes_past_an_int32_are_no_error(name, workers):
    """The largest n there is, with everything selected: traced, not run."""
    if name == "ring_sparse" and workers > 8:
        workers = 64  # Its program grows with P.
    allreduce = table.make(name.partition(",")[0], 1.0, **AT_THE_LARGEST[name])

    def step(values, indices, state):
        coo = sc.PaddedCOO(values, indices, LARGEST)
        return allreduce.reduce(coo, state, axis="w")

    values = jax.ShapeDtypeStruct((workers, LARGEST), jnp.float32)
    indices = jax.ShapeDtypeStruct((workers, LARGEST), jnp.int32)
    state = jax.eval_shape(lambda: allreduce.init(LARGEST, workers))
    run = jax.vmap(step, in_axes=(0, 0, None), axis_name="w", axis_size=workers)
    total, _, _, info = jax.eval_shape(run, values, indices, state)
    assert (total.size if isinstance(total, sc.PaddedCOO) else total.shape[1]) == LARGEST
    assert info.useful.dtype == jnp.float32


def test_values_that_are_the_same_on_all_workers_are_exchanged_under_vmap():
    """For example initial zeros, which vmap does not treat as different."""

    def step(x):
        mine = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
        return sc.transport.all_to_all(mine, "w") + x

    found = sc.simulate(step, axis="w", axis_size=3)(jnp.zeros((3, 1, 1), jnp.int32))
    for worker in range(3):
        row = np.arange(4 * worker, 4 * worker + 4)
        np.testing.assert_array_equal(found[worker], np.stack([row] * 3))
