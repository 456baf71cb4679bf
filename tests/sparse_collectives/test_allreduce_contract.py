"""What every allreduce must hold, over the table of all of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests import jax_internals
from tests.sparse_collectives import helpers, nodes, table
from tests.sparse_collectives.table import (
    ALLREDUCES,
    DENSITY,
    ENCODED,
    OVER_NODES,
    WITH_CODECS,
)

__all__ = ["ALLREDUCES", "CODECS", "DENSITY", "ENCODED", "OVER_NODES", "WITH_CODECS"]

SIZE, STEPS = 403, 4
SELECTOR = sc.select.topk(density=DENSITY)
CODECS = table.LOSSY_CODECS
EACH = ALLREDUCES | OVER_NODES
KEEPS_OTHER_VALUES = {name for name, row in EACH.items() if row.rounds}
# Each with more numbers of workers, in 16 bits of both kinds; the others are variants of them.
ALGORITHMS = {*table.ALGORITHMS, "agreed, few bits", "auto, which may be spardl"}
ALGORITHMS |= {"ok_topk, as published"}
ALGORITHMS -= {"leader", "dense_bucketed"}
# What they may keep of the total of another one, or of an encoding, has tests of its own.
KEEPS_OWN = [name for name in EACH if name not in KEEPS_OTHER_VALUES]
# First, so that both tests of a case come one after the other.
ROWS = EACH | WITH_CODECS
ROWS = {name: ROWS[name] for name in (*KEEPS_OWN, *ROWS)}


def run_once(name, acc, state=None, shape=None):
    """A step of the row, and in it the state for the next one; nodes of two, if not told."""
    allreduce, workers = ROWS[name].allreduce, len(acc)
    if name in OVER_NODES:
        shape = shape or (workers // math.gcd(workers, 2), math.gcd(workers, 2))
        return nodes.run_once(SELECTOR, allreduce, acc, shape, state)
    out = helpers.run_once(SELECTOR, allreduce, acc, state)
    return {**out, "allreduce_state": helpers.next_state(out)}


def places(name):
    """Numbers of workers, or the shapes of their nodes: powers of two and others."""
    if name in OVER_NODES:
        return (1, 3), (3, 1), (2, 3), (4, 2)
    if name in WITH_CODECS:
        # One more for one codec of each; of Ok-Topk test_lossy.py has the others.
        third = (3,) if list(WITH_CODECS).index(name) % 5 == 1 else ()
        return (*third, 7) if name.startswith("ok_topk") else (*third, 4, 7)
    if name == "ok_topk":
        return helpers.WORKERS
    return (2, 5, 7, 8) if name in ALGORITHMS else (3, 8)


def cases(names, quick):
    """Each row with its numbers of workers; compiling them takes minutes, so most are slow."""
    for name in names:
        for place in places(name):
            of_nodes = isinstance(place, tuple)
            yield pytest.param(
                (name, *((math.prod(place), place) if of_nodes else (place, None))),
                marks=() if place in quick.get(name, ()) else pytest.mark.slow,
                id=f"{name}-{place[0]}x{place[1]}" if of_nodes else f"{name}-{place}",
            )


# Ok-Topk, and what compiles fast.
QUICK = {
    "ok_topk": (3,),
    "topk_a": (2, 7),
    "topk_a, lossy": (3,),
    "sparse_allgather": (5,),
    "sparse_allgather, qsgd": (3,),
    "dense_bucketed": (3,),
    "agreed, few bits": (7,),
    "hierarchical topk_a": ((2, 3),),
    "torus_2d": ((2, 3),),
}
# One step of one kind of gradients is less than all of them.
QUICK_STEPS = QUICK | {
    "ok_topk": (),
    "topk_a": (2, 5, 7),
    "sparse_allgather": (2, 5),
    "ssar_recursive_double": (2,),
    "ssar_split_allgather, room for all": (3,),
}
# Rows that compile fast, in each of the tests below.
LIGHT = {"leader", "dense_bucketed", "topk_a", "topk_a, lossy", "sparse_allgather"}
LIGHT |= {"hierarchical topk_a", "torus_2d"}


@pytest.fixture(scope="module")
def case(request):
    return request.param


@pytest.mark.parametrize("case", list(cases(ROWS, QUICK)), indirect=True)
def test_nothing_is_lost_and_all_workers_agree(case):
    row, workers, shape = case
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        state = None
        for step in range(STEPS):
            acc = np.roll(acc, 7 * step, axis=1)
            out = run_once(row, acc, state, shape)
            state = out["allreduce_state"]
            where = f"{name}, step {step}"
            helpers.check_conserved(out, where)
            for field in ("delivered", "threshold", "words"):
                values = np.asarray(getattr(out["info"], field))
                assert (values == values[0]).all(), where


@pytest.mark.parametrize("case", list(cases(KEEPS_OWN, QUICK_STEPS)), indirect=True)
def test_what_is_kept_was_sent(case):
    name, workers, shape = case
    acc = helpers.hard_accumulators(workers, SIZE)["normal"]
    out = run_once(name, acc, shape=shape)
    sent, kept = np.asarray(out["sent"]), np.asarray(out["kept"])
    assert ((kept == 0) | (kept == sent)).all()
    if ROWS[name].delivers_all:
        assert (kept == 0).all()


def check_is_a_dense_sum(out, acc):
    # The order of the sum differs from that of numpy.
    expected = np.broadcast_to(acc.astype(np.float64).sum(axis=0), acc.shape)
    np.testing.assert_allclose(out["total"], expected, rtol=2e-6, atol=2e-6)
    assert (np.asarray(out["kept"]) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 4, 7, 8])
def test_density_one_with_room_for_all_is_a_dense_sum(workers):
    """61 entries are a multiple of no number of workers but 1."""
    ok_topk, auto = sc.allreduce.ok_topk, sc.planner.auto
    names = ["dense", "dense_bucketed", "topk_a", "agreed"]
    names += ["gtopk", "spardl"] if workers != 4 else []
    if workers == 3:
        names = [name for name, algorithm in table.ALGORITHMS.items() if algorithm.room is not None]
    allreduces = [
        *(table.make(name, 1.0, **(table.ALGORITHMS[name].room or {})) for name in names),
        ok_topk(density=1.0, slack=float(workers)),
        ok_topk(density=1.0, paper=True, slack=math.inf),
        auto(density=1.0, latency="1us", bandwidth="1Gbit"),
    ]
    acc = helpers.hard_accumulators(workers, 61)["normal"]
    for allreduce in allreduces:
        check_is_a_dense_sum(helpers.run_once(sc.select.topk(density=1.0), allreduce, acc), acc)


@pytest.mark.slow
@pytest.mark.parametrize("shape", places("torus_2d"))
def test_density_one_with_room_for_all_is_a_dense_sum_over_nodes(shape):
    outers = (
        sc.allreduce.topk_a(),
        sc.allreduce.agreed(density=1.0),
        sc.allreduce.ok_topk(density=1.0, slack=float(shape[0])),
    )
    allreduces = [sc.allreduce.hierarchical(inner_axis="device", outer=o) for o in outers]
    acc = helpers.hard_accumulators(math.prod(shape), 61)["normal"]
    for allreduce in (*allreduces, sc.allreduce.published.torus_2d()):
        out = nodes.run_once(sc.select.topk(density=1.0), allreduce, acc, shape)
        check_is_a_dense_sum(out, acc)


QUICK_OF_ONE = LIGHT | {"complete ring_sparse", "ring_sparse", "ssar_recursive_double"}
QUICK_OF_ONE |= {"ssar_split_allgather", "dsar_split_allgather", "gtopk", "gtopk, lossy"}
QUICK_OF_ONE |= {"spardl, lossy", "auto, which may be spardl"}


# What is delivered of a selection that was made without a view of the indices is less than it.
SELECTED = [row for row in EACH if row != "shared_random"]


@pytest.mark.parametrize("row", helpers.slow_but(QUICK_OF_ONE, SELECTED))
def test_one_worker_is_plain_selection(row):
    for name, acc in helpers.hard_accumulators(1, SIZE).items():
        if name == "subnormal":
            continue  # not delivered by ok_topk: its own test says so
        out = run_once(row, acc)
        np.testing.assert_array_equal(out["total"], out["sent"])
        assert out["info"].words[0] == 0


QUICK_STATES = LIGHT | {"agreed", "dense", "complete ring_sparse", "auto, which may be spardl"}
QUICK_STATES |= {"ssar_split_allgather", "ssar_split_allgather, room for all"}


@pytest.mark.parametrize("row", helpers.slow_but(QUICK_STATES, EACH))
def test_state_keeps_shapes_and_dtypes_and_steps_are_traced_once(row):
    allreduce, workers = ROWS[row].allreduce, 6 if row in OVER_NODES else 3
    acc = helpers.hard_accumulators(workers, SIZE)["normal"]
    if row in OVER_NODES:
        state = nodes.initial(allreduce, SIZE, (3, 2))
        reduce = nodes.simulated_step(SELECTOR, allreduce, (3, 2))
    else:
        state = allreduce.init(SIZE, workers)
        reduce = helpers.simulated_reduce(allreduce, workers)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for i in range(3):
        state = run_once(row, acc * (i + 1), state)["allreduce_state"]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == expected
    before = jax_internals.programs(reduce)
    run_once(row, acc * 9, state)
    assert jax_internals.programs(reduce) == before


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("sparse_allgather", jnp.bfloat16),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for dtype, names in ((jnp.bfloat16, EACH), (jnp.float16, sorted(ALGORITHMS)))
            for name in names
            if (name, dtype) != ("sparse_allgather", jnp.bfloat16)
        ),
    ],
)
def test_sixteen_bit_values(name, dtype):
    acc = jnp.asarray(helpers.hard_accumulators(4, SIZE)["normal"]).astype(dtype)
    out = run_once(name, acc)
    assert out["total"].dtype == dtype
    total, sent, kept = (np.asarray(out[name], np.float64) for name in ("total", "sent", "kept"))
    # The total is rounded once to the dtype.
    scale = np.abs(sent).sum(axis=0) + 1e-30
    error = np.abs(sent.sum(axis=0) - kept.sum(axis=0) - total[0]) / scale
    assert error.max() <= 4 * float(jnp.finfo(dtype).eps)
