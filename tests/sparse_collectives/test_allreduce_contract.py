"""The contract of every allreduce, over the table of all of them.

Each row and number of workers is one program: nothing is lost, all workers have the same bits, the
state keeps its types, the reported words are the words of the traced program, and one worker
exchanges nothing. A second program has values of 16 bits.
"""

import contextlib
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sparse_collectives as sc
from tests.sparse_collectives import helpers, nodes, table
from tests.sparse_collectives.table import ALLREDUCES, DENSITY, OVER_NODES, WITH_CODECS

SIZE, STEPS = 403, 4
SELECTOR = sc.select.topk(density=DENSITY)
EACH = ALLREDUCES | OVER_NODES
KEEPS_OTHER_VALUES = {name for name, row in EACH.items() if row.rounds}
# Tested with more numbers of workers and both 16-bit types; the others are variants of these.
ALGORITHMS = {*table.ALGORITHMS, "partitioned_topk, few bits", "auto, which may be spardl"}
ALGORITHMS |= {"ok_topk, as published"}
ALGORITHMS -= {"dense_bucketed"}
ROWS = EACH | WITH_CODECS


def test_every_public_allreduce_is_in_the_registry():
    rows = {name.partition("(")[0] for name in sc.cost_model.ALGORITHMS}
    # `full_sums` is around another one.
    found = table.public(sc.allreduce, sc.SparseAllreduce) - {"full_sums"}
    assert found == rows, "add a row to cost_model/_registry.py"


def initial(name, size, workers, shape=None):
    """The row's state before the first step; for nodes, the states of all workers."""
    allreduce = ROWS[name].allreduce
    return nodes.initial(allreduce, size, shape) if shape else allreduce.init(size, workers)


def run_once(name, acc, state=None, shape=None):
    """A step of the row, with the state for the next one; nodes of two by default."""
    allreduce, workers = ROWS[name].allreduce, len(acc)
    if name in OVER_NODES:
        shape = shape or (workers // math.gcd(workers, 2), math.gcd(workers, 2))
        return nodes.run_once(SELECTOR, allreduce, acc, shape, state)
    out = helpers.run_once(SELECTOR, allreduce, acc, state)
    return {**out, "allreduce_state": helpers.next_state(out)}


def places(name):
    """Numbers of workers, or the shapes of their nodes: powers of two and others."""
    if name in OVER_NODES:
        return (1, 1), (1, 3), (3, 1), (2, 3), (4, 2)
    if name in WITH_CODECS:
        # One more number of workers for one codec of each allreduce.
        third = (3,) if list(WITH_CODECS).index(name) % 5 == 1 else ()
        # One worker encodes nothing if the owner of an entry has it exactly.
        return (1, *third, 7) if name.startswith("ok_topk") else (*third, 4, 7)
    if name == "ok_topk":
        return helpers.WORKERS
    # shared_random delivers only a part of a selection that was made without its view.
    one = () if name == "shared_random" else (1,)
    return (*one, 2, 5, 7, 8) if name in ALGORITHMS else (*one, 3, 8)


# Rows that compile fast, here and in the tests of programs.
LIGHT = {"dense_bucketed", "topk_a", "topk_a, lossy", "sparse_allgather"}
LIGHT |= {"hierarchical topk_a", "torus_2d"}
QUICK_OF_ONE = LIGHT | {"full_sums ring_sparse", "ring_sparse", "ssar_recursive_double"}
QUICK_OF_ONE |= {"ssar_split_allgather", "dsar_split_allgather", "gtopk", "gtopk, lossy"}
QUICK_OF_ONE |= {"spardl, lossy", "auto, which may be spardl"}
# Ok-Topk, and rows that compile fast.
QUICK = {
    "ok_topk": (3,),
    "topk_a": (2, 7),
    "topk_a, lossy": (3,),
    "sparse_allgather": (5,),
    "sparse_allgather, qsgd": (3,),
    "dense_bucketed": (3,),
    "partitioned_topk, few bits": (7,),
    "hierarchical topk_a": ((2, 3),),
    "torus_2d": ((2, 3),),
}


def cases():
    """Each row with its numbers of workers; compiling them takes minutes, so most are slow."""
    for name in ROWS:
        for place in places(name):
            of_nodes = isinstance(place, tuple)
            quick = place in QUICK.get(name, ())
            quick |= place in (1, (1, 1)) and name in QUICK_OF_ONE
            yield pytest.param(
                *(name, *((math.prod(place), place) if of_nodes else (place, None))),
                marks=() if quick else pytest.mark.slow,
                id=f"{name}-{place[0]}x{place[1]}" if of_nodes else f"{name}-{place}",
            )


def traced(name, size, workers, shape=None):
    """A step of the row on absent devices, which is traced once for its words and platforms."""
    allreduce, of_nodes = ROWS[name].allreduce, name in OVER_NODES
    axes = dict(zip(nodes.AXES, shape)) if of_nodes else {"w": workers}
    # An argument: a constant may decide a conditional while it is traced.
    state = jax.eval_shape(lambda: initial(name, size, workers, shape))
    state = jax.tree.map(lambda x: x.update(shape=x.shape[2 * of_nodes :]), state)

    def step(acc, state):
        if of_nodes:
            return nodes.step_of(SELECTOR, allreduce)(acc, state)
        coo, _, _ = SELECTOR.select(acc, SELECTOR.init(size))
        return allreduce.reduce(coo, state, axis="w")

    whole = PartitionSpec()
    given = {"mesh": helpers.abstract_mesh(**axes), "in_specs": whole, "out_specs": whole}
    step = jax.jit(jax.shard_map(step, **given, check_vma=False))
    return step.trace(jax.ShapeDtypeStruct((size,), jnp.float32), state)


def one_hot(kind, branches):
    return [{kind: tuple(float(i == each) for i in range(branches))} for each in range(branches)]


# The choices of a step by its data.
BALANCES, DELIVERIES = one_hot("balance", 4) + one_hot("balance", 2), one_hot("delivery", 2)
CHOICES = [{}, *BALANCES, *DELIVERIES, *(b | d for b in BALANCES for d in DELIVERIES)]
CHOICES += [form for branches in (2, 3, 4) for form in one_hot("form", branches)]


@functools.cache
def possible_words(name, workers, shape):
    """The words of every way that a step may take, with and without what it does periodically."""
    program, found = traced(name, SIZE, workers, shape), set()
    for choice in CHOICES:
        with contextlib.suppress(ValueError):  # Without this choice, or with more branches.
            # What the devices of a node agree on, to take the same branch, does not count.
            moved = [
                r
                for r in sc.traffic.of_traced(program, choice).collectives
                if not (r.scope.startswith("hierarchical/outer") and r.axes == ("device",))
            ]
            always = sum(r.words for r in moved if r.weight == 1)
            periodic = {}
            for r in moved:
                if r.weight not in (0, 1):
                    periodic[r.scope] = periodic.get(r.scope, 0) + r.words
            for some in itertools.product((0, 1), repeat=len(periodic)):
                extra = sum(s * w for s, w in zip(some, periodic.values()))
                found.add(round(always + extra))
    return found


def types_of(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


@pytest.mark.parametrize(("row", "workers", "shape"), list(cases()))
@pytest.mark.one_in(2)
def test_allreduces_lose_nothing_agree_report_their_words_and_keep_types(row, workers, shape):
    types = types_of(initial(row, SIZE, workers, shape))
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        if workers == 1 and name == "subnormal":
            continue  # Not delivered by ok_topk, and not counted by others.
        state = None
        for step in range(STEPS):
            acc = np.roll(acc, 7 * step, axis=1)
            out = run_once(row, acc, state, shape)
            state = out["allreduce_state"]
            assert types_of(state) == types
            where = f"{name}, step {step}"
            # A code of few bits has the scale of its block, and so has its error.
            helpers.check_conserved(out, where, rounds="few bits" in row)
            for field in ("delivered", "threshold", "words"):
                values = np.asarray(getattr(out["info"], field))
                assert (values == values[0]).all(), where
            check_what_is_kept(row, out, where)
            check_words(row, out, where, possible_words(row, workers, shape))
            if workers == 1:
                np.testing.assert_array_equal(out["total"], out["sent"], where)


def check_words(name, out, where, possible):
    words, useful = float(out["info"].words[0]), np.asarray(out["info"].useful, np.float64).mean()
    assert round(words) in possible, where
    assert useful <= words * (1 + 1e-6), where
    if name in ("dense", "dense_bucketed", "torus_2d") or (name, where[:6]) == ("gtopk", "normal"):
        assert useful == pytest.approx(words, rel=1e-6), where
    if where.startswith("all zero") and name in ("gtopk", "topk_a", "sparse_allgather"):
        assert useful == 0, where


def check_what_is_kept(name, out, where):
    """Workers keep sent entries; other tests cover sums of others and rounding errors."""
    sent, kept, total = np.asarray(out["sent"]), out["kept"], np.asarray(out["total"][0])
    delivered = np.asarray(out["info"].delivered)
    if name not in KEEPS_OTHER_VALUES and name not in WITH_CODECS:
        assert ((kept == 0) | (kept == sent)).all(), where
    if ROWS[name].delivers_all:
        # A full sum that is 0 waits.
        gone = total != 0 if name.startswith("full_sums") else slice(None)
        assert not kept[:, gone].any(), where
        # If a sum is dense, values that add up to 0 are not entries.
        entries = (sent.any(axis=0).sum(), np.count_nonzero(total))
        assert np.isin(delivered, entries).all(), where
    if name.endswith(", lossy") and len(sent) > 1:
        # A worker's own values are also the decoded ones.
        np.testing.assert_array_equal(total * 256, np.round(total * 256), where)
        if name in ("topk_a, lossy", "sparse_allgather, lossy") and where.startswith("normal"):
            assert (np.asarray(out["info"].overflow) >= round(DENSITY * SIZE) // 7).all(), where
    if name.startswith("ok_topk"):
        # Entries outside the total stay unchanged with their workers, also if others are rounded.
        counts = np.bincount(np.asarray(out["indices"][0]), minlength=SIZE + 1)[:SIZE]
        assert counts.max() <= 1, where
        assert (delivered == counts.sum()).all(), where
        np.testing.assert_array_equal(kept[:, counts == 0], sent[:, counts == 0], where)


def with_room_for_all(workers):
    names = ["dense", "dense_bucketed", "topk_a", "partitioned_topk"]
    names += ["gtopk", "spardl"] if workers != 4 else []
    if workers == 3:
        names = [name for name, algorithm in table.ALGORITHMS.items() if algorithm.room is not None]
    yield from (table.make(name, 1.0, **(table.ALGORITHMS[name].room or {})) for name in names)
    yield sc.allreduce.ok_topk(density=1.0, slack=float(workers))
    yield sc.allreduce.ok_topk(density=1.0, paper=True, slack=math.inf)
    yield sc.planner.auto(density=1.0, latency="1us", bandwidth="1Gbit")


def with_room_for_all_nodes(number):
    yield sc.allreduce.published.torus_2d()
    for outer in (
        sc.allreduce.topk_a(),
        sc.allreduce.partitioned_topk(density=1.0),
        sc.allreduce.ok_topk(density=1.0, slack=float(number)),
    ):
        yield sc.allreduce.hierarchical(inner_axis="device", outer=outer)


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 3, 4, 7, 8, *places("torus_2d")])
def test_density_one_with_room_for_all_is_a_dense_sum(place):
    """61 entries are a multiple of no number of workers but 1."""
    of_nodes, selector = isinstance(place, tuple), sc.select.topk(density=1.0)
    acc = helpers.hard_accumulators(math.prod(place) if of_nodes else place, 61)["normal"]
    # The order of the sum differs from NumPy's.
    expected = np.broadcast_to(acc.astype(np.float64).sum(axis=0), acc.shape)
    for allreduce in with_room_for_all_nodes(place[0]) if of_nodes else with_room_for_all(place):
        if of_nodes:
            out = nodes.run_once(selector, allreduce, acc, place)
        else:
            out = helpers.run_once(selector, allreduce, acc)
        np.testing.assert_allclose(out["total"], expected, rtol=2e-6, atol=2e-6)
        assert (np.asarray(out["kept"]) == 0).all()


@pytest.mark.parametrize("size", [1, 9])
def test_zeros_after_the_end_of_a_vector_are_not_counted_as_delivered(size):
    outer, selector = sc.allreduce.shared_random(density=1.0), sc.select.topk(density=1.0)
    allreduce, shape = sc.allreduce.hierarchical(inner_axis="device", outer=outer), (1, 7)

    def delivered(acc, state):
        shard = allreduce.scatter(acc)
        coo, *_ = selector.select(shard, selector.init(shard.shape[0]))
        return allreduce.reduce(coo, state, axis=nodes.AXES, acc=shard)[-1].delivered

    states = nodes.initial(allreduce, size, shape)
    found = sc.simulate(delivered, axis=nodes.AXES, axis_size=shape)(
        jnp.ones((*shape, size)), states
    )
    assert (found == size).all()


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
