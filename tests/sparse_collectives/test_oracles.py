"""TopkA, the sparse allgather, gTop-k, SparDL and SparCML are the exchanges of their papers.

Each against its oracle, which follows the paper message by message. What holds for all allreduces
is in test_allreduce_contract.py.
"""

import jax.numpy as jnp
import numpy as np
import pytest

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
