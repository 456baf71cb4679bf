"""TopkA, the sparse allgather, gTop-k, SparDL and SparCML are the exchanges of their papers.

Each against its oracle, which follows the paper message by message. What holds for all allreduces
is in test_allreduce_contract.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._shared import _hashed, _step
from sparse_collectives.allreduce._shared._step import StepState
from tests.reference import gtopk, sparcml, spardl, topk_a, windows
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.helpers import as_entries, slow
from tests.sparse_collectives.test_allreduce_contract import DENSITY, SELECTOR, SIZE

K = round(DENSITY * SIZE)
ALLGATHER, SPARDL = table.make("sparse_allgather"), table.make("spardl")


def hard_steps(allreduce, workers, state=None, subnormal=False):
    """``(name, out)`` of one step on each of the hard accumulators."""
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        # Sums of subnormals may be flushed to zero.
        if subnormal or name != "subnormal":
            yield name, helpers.run_once(SELECTOR, allreduce, acc, state)


def check_total(out, total, name):
    np.testing.assert_array_equal(out["total"], np.broadcast_to(total, out["total"].shape), name)


def smallest(total):
    return np.float32(np.abs(total[total != 0]).min()) if total.any() else np.float32(0)


@pytest.mark.parametrize("workers", [2, *slow(5)])
def test_topk_a_is_the_sum_of_all_selections(workers):
    for name, out in hard_steps(table.make("topk_a"), workers):
        total = topk_a.topk_a(as_entries(out["sent"]), SIZE)
        check_total(out, total, name)
        assert (np.asarray(out["info"].delivered) == np.count_nonzero(total)).all()
        assert not np.asarray(out["kept"]).any()


@pytest.mark.parametrize("workers", [2, 5])
def test_sparse_allgather_delivers_each_index_for_its_first_worker(workers):
    for count in range(3):
        state = StepState(jnp.int32(count))
        first = windows.start(int(_step.turn(jnp.int32(count), 0)), workers)
        for name, out in hard_steps(ALLGATHER, workers, state, subnormal=True):
            # Bits, so that subnormals count too.
            total, kept = topk_a.sparse_allgather(as_entries(out["sent"]), SIZE, first)
            check_total(out, total, name)
            counts = [len(entries) for entries in kept]
            np.testing.assert_array_equal(out["info"].overflow, counts, name)
            if name != "subnormal":  # the tests add up what is kept
                assert as_entries(out["kept"]) == kept, name
            if name == "disjoint":
                assert sum(counts) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "density"), [(2, 0.05), (3, 0.05), (8, 0.05), (3, 0.025)])
def test_gtopk_is_the_tree_of_the_paper(workers, density):
    """Of a selection that is larger than k the k largest take part."""
    k = round(density * SIZE)
    for name, out in hard_steps(table.make("gtopk", density), workers):
        total, dropped = gtopk.gtopk(as_entries(out["sent"]), SIZE, k)
        check_total(out, total, name)
        np.testing.assert_allclose(out["kept"], dropped, rtol=1e-6, err_msg=name)
        assert (np.asarray(out["info"].threshold) == smallest(total)).all(), name
        assert (np.asarray(out["info"].delivered) <= k).all(), name


# k is no multiple of 3, 7 and 8. Then of a larger selection the largest take part, and of a
# smaller one all.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "k", "steps"),
    [
        *((workers, K, (0, 5)) for workers in (3, 2, 5, 7, 8)),
        *((workers, k, (0,)) for workers, k in ((5, 3), (8, 3), (6, 13), (7, 1), (3, 81))),
    ],
)
def test_spardl_is_the_exchange_of_the_paper(workers, k, steps):
    allreduce = table.make("spardl", k / SIZE)
    for step in steps:
        state = StepState(jnp.int32(step))
        indices = jnp.arange(SIZE, dtype=jnp.int32)
        _, owner = _hashed.row_and_owner(indices, SIZE, workers, jnp.int32(step))
        for name, out in hard_steps(allreduce, workers, state):
            selected, info = as_entries(out["sent"]), out["info"]
            total, kept, lengths = spardl.spardl(selected, np.asarray(owner), k)
            check_total(out, total, name)
            np.testing.assert_allclose(out["kept"], kept, rtol=1e-6, err_msg=name)
            assert (np.asarray(info.overflow) == 0).all(), name
            assert (np.asarray(info.delivered) == (total != 0).sum()).all(), name
            assert info.threshold[0] == smallest(total), name
            useful = 2 * np.sum(lengths[:-1], axis=0) + 2 * (workers - 1) * np.asarray(lengths[-1])
            np.testing.assert_allclose(info.useful, useful, rtol=1e-6, err_msg=name)


def paper_sum(name, streams, size):
    if name == "ssar_recursive_double":
        return sparcml.recursive_double(streams)[0]
    if name == "ring_sparse":
        return sparcml.ring(streams, size)
    return sparcml.split_allgather(streams, size)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("name", ["ssar_recursive_double", "ssar_split_allgather", "ring_sparse"])
def test_the_sums_of_sparcml_are_those_of_the_paper_and_the_dense_one(name, workers):
    allreduce = table.make(name, **table.ALGORITHMS[name].room)
    for case, out in hard_steps(allreduce, workers):
        sent = np.asarray(out["sent"], np.float64)
        stream = paper_sum(name, sparcml.as_streams(sent), SIZE)
        scale = np.abs(sent).max() * 1e-6
        for expected in (sparcml.as_vector(stream, SIZE), sent.sum(axis=0)):
            np.testing.assert_allclose(out["total"][0], expected, atol=scale, err_msg=case)
        # Where a sum is dense, values that add up to 0 are no entries.
        entries = (len(stream), np.count_nonzero(out["total"][0]))
        assert np.isin(out["info"].delivered, entries).all(), case
        assert not np.asarray(out["kept"]).any(), case


WIDE = sc.select.topk(density=0.2)


def exact_total(sent):
    return np.asarray(sent, np.float64).sum(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dense"), [("normal", True), ("same on all", False), ("one worker", False)]
)
def test_dense_regions_are_sent_where_the_union_passes_delta(case, dense):
    workers, size = 4, 400
    allreduce = table.make("dsar_split_allgather", slack=math.inf, sparse_sizes=2)
    acc = helpers.hard_accumulators(workers, size)[case]
    out = helpers.run_once(WIDE, allreduce, acc)
    streams = sparcml.as_streams(np.asarray(out["sent"]))
    assert sparcml.is_dense(streams, size, 4, 4) == dense
    np.testing.assert_allclose(out["total"][0], exact_total(out["sent"]), atol=1e-5)
    assert not np.asarray(out["kept"]).any()
    assert (np.asarray(out["info"].delivered) == len(sparcml.split_allgather(streams, size))).all()
    # Forms of 25 pairs, of 50 pairs (delta / P) and of 100 values.
    fullest = max(len(owned) for owned in sparcml.split(streams, size))
    form = sum(fullest > slots for slots in (25, 50))
    assert (form == 2) == dense
    one_hot = tuple(float(i == form) for i in range(3))
    traffic = sc.traffic.of_allreduce(
        allreduce, size=size, capacity=80, axis_size=workers, frequencies={"form": one_hot}
    )
    assert float(out["info"].words[0]) == traffic.words


def test_the_switch_is_where_both_messages_have_the_same_words():
    """With 16-bit values a dense region is half as long, and delta half as large."""
    for dtype, slots in ((jnp.float32, 125), (jnp.bfloat16, 62)):
        shapes = jax.ShapeDtypeStruct((400,), dtype), jax.ShapeDtypeStruct((400,), jnp.int32)
        allreduce = sc.allreduce.published.dsar_split_allgather(slack=math.inf, sparse_sizes=1)

        def step(values, indices, count, allreduce=allreduce):
            state = StepState(count)
            return allreduce.reduce(sc.PaddedCOO(values, indices, 1000), state, axis="w")

        traffic = sc.traffic.of_function(
            step,
            *shapes,
            jax.ShapeDtypeStruct((), jnp.int32),
            axis="w",
            axis_size=4,
            frequencies={"form": (1.0, 0.0)},
        )
        assert traffic.collectives[-1].words == 2 * slots * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "density", "size"), [(7, 0.15, 203), (4, 0.15, 203), (3, 0.7, 203), (8, 0.5, 5)]
)
@pytest.mark.parametrize("name", ["ssar_recursive_double", "ssar_split_allgather", "ring_sparse"])
def test_sums_of_dense_streams(name, workers, density, size):
    """The switch is after some rounds, or before the first; of 5 indices some have no owner."""
    room = table.ALGORITHMS[name].room if size < workers else {}
    allreduce = table.make(name, **room)
    for case in ("normal", "one region", "cancelling"):
        acc = helpers.hard_accumulators(workers, max(size, 16))[case][:, :size]
        out = helpers.run_once(sc.select.topk(density=density), allreduce, acc)
        helpers.check_conserved(out, case)
    capacity = round(size * density)
    traffic = sc.traffic.of_allreduce(allreduce, size=size, capacity=capacity, axis_size=workers)
    assert np.asarray(out["info"].words) == pytest.approx(traffic.words)
    # In the end there is room for everything.
    if density >= 0.5:
        assert not np.asarray(out["kept"]).any()
        np.testing.assert_allclose(out["total"][0], exact_total(out["sent"]), atol=1e-5)
