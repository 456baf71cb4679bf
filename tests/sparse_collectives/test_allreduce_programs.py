"""The programs of the allreduces: words, platforms, a mesh of devices, and the largest n."""

import contextlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sparse_collectives as sc
from tests.sparse_collectives import helpers, nodes, table
from tests.sparse_collectives.test_allreduce_contract import (
    DENSITY,
    EACH,
    LIGHT,
    OVER_NODES,
    ROWS,
    SELECTOR,
    SIZE,
)

WHOLE = PartitionSpec()
# With a codec.
OK_TOPK = tuple(f"ok_topk, {codec}" for codec in table.LOSSY_CODECS)


def ways_of(allreduce, size, workers):
    """The traffic of each way that a step may take; one way if there is no choice."""

    def choices(kind, branches):
        return [
            {kind: tuple(float(i == each) for i in range(branches))} for each in range(branches)
        ]

    balances, deliveries = choices("balance", 4) + choices("balance", 2), choices("delivery", 2)
    forms = [form for branches in (2, 3, 4) for form in choices("form", branches)]
    given = {"size": size, "capacity": round(DENSITY * size), "axis_size": workers}
    ways = []
    for frequencies in [*balances, *(b | d for b in balances for d in deliveries), *forms]:
        with contextlib.suppress(ValueError):  # Without this choice, or with more branches.
            ways.append(sc.traffic.of_allreduce(allreduce, **given, frequencies=frequencies))
    return ways or [sc.traffic.of_allreduce(allreduce, **given)]


@pytest.mark.parametrize(
    "name",
    helpers.slow_but(
        ("topk_a, lossy",),
        [
            *("agreed", "agreed, few bits", "full_sums ok_topk", "dense"),
            *("dense_bucketed", "ok_topk", "ok_topk, reused global threshold"),
            *("ok_topk, balanced regions", "ok_topk, as published", "auto, ok_topk"),
            *("auto, which may be spardl", "topk_a", "topk_a, lossy", "sparse_allgather"),
            *("gtopk", "spardl", "ssar_recursive_double", "ssar_split_allgather, room for all"),
            *("dsar_split_allgather", "ring_sparse"),
            *OK_TOPK,
        ],
    ),
)
def test_info_reports_the_words_that_the_program_moves(name):
    allreduce = ROWS[name].allreduce
    workers, size = 8, 10_000
    acc = helpers.hard_accumulators(workers, size)["normal"]
    state = allreduce.init(size, workers)
    possible = set()
    for traffic in ways_of(allreduce, size, workers):
        always = sum(r.words * r.weight for r in traffic.collectives if r.weight == 1)
        periodic = {}
        for r in traffic.collectives:
            if r.weight != 1:
                periodic[r.scope] = periodic.get(r.scope, 0) + r.words
        for share in itertools.product((0, 1), repeat=len(periodic)):
            extra = sum(s * w for s, w in zip(share, periodic.values(), strict=True))
            possible.add(round(always + extra))
    for _ in range(5):
        out = helpers.run_once(SELECTOR, allreduce, acc, state)
        state = helpers.next_state(out)
        assert round(float(out["info"].words[0])) in possible
        acc = np.roll(acc, 1, axis=1)


CUDA_FAST = LIGHT | {"agreed, few bits", "dense", "dsar_split_allgather"}
CUDA_FAST |= {"agreed", "ssar_split_allgather, room for all"}


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
    allreduce, size, workers = ROWS[row].allreduce, 1000, 64
    axes = {"node": 16, "device": 4} if row in OVER_NODES else {"w": workers}

    def step(acc):
        state = allreduce.init(size, workers)
        if row in OVER_NODES:
            return nodes.step_of(SELECTOR, allreduce)(acc, state)
        coo, _, _ = SELECTOR.select(acc, SELECTOR.init(size))
        return allreduce.reduce(coo, state, axis="w")

    mesh = helpers.abstract_mesh(**axes)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((size,), jnp.float32))
    assert "stablehlo" in traced.lower(lowering_platforms=(platform,)).as_text()


ON_A_MESH = ("topk_a", "sparse_allgather", "gtopk", "spardl", "ssar_recursive_double")
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
def test_on_a_mesh_the_total_is_replicated(name, check_vma, workers):
    allreduce = ROWS[name].allreduce
    helpers.check_replicated_on_a_mesh(
        SELECTOR, allreduce, SIZE, check_vma=check_vma, workers=workers
    )


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


def test_what_is_the_same_on_all_workers_is_exchanged_under_vmap():
    """For example initial zeros, which vmap does not treat as different."""

    def step(x):
        mine = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
        return sc.transport.all_to_all(mine, "w") + x

    found = sc.simulate(step, axis="w", axis_size=3)(jnp.zeros((3, 1, 1), jnp.int32))
    for worker in range(3):
        row = np.arange(4 * worker, 4 * worker + 4)
        np.testing.assert_array_equal(found[worker], np.stack([row] * 3))
