"""TopkA, the sparse allgather, gTop-k, SparDL and SparCML are the exchanges of their papers.

test_allreduce_contract.py has the tests for all allreduces.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _hash
from sparse_collectives.allreduce._parts import _hashed
from sparse_collectives.allreduce._parts._frame import StepState
from tests.reference import exchanges, windows
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.helpers import as_entries, slow_rows
from tests.sparse_collectives.test_allreduce_contract import DENSITY, SELECTOR, SIZE

K = round(DENSITY * SIZE)


def smallest(total):
    return np.float32(np.abs(total[total != 0]).min()) if total.any() else np.float32(0)


def gathered(selected):
    """Useful words of an allgather of all pairs."""
    return 2 * (len(selected) - 1) * np.asarray([len(entries) for entries in selected])


# The total, the kept entries, and fields of the info.


def of_topk_a(selected, k, step):
    return *exchanges.topk_a(selected, SIZE), {"useful": gathered(selected)}


def of_sparse_allgather(selected, k, step):
    first = windows.start(int(_hash.turn(jnp.int32(step), 0)), len(selected))
    total, kept = exchanges.sparse_allgather(selected, SIZE, first)
    return total, kept, {"overflow": (kept != 0).sum(axis=1), "useful": gathered(selected)}


def of_gtopk(selected, k, step):
    total, dropped = exchanges.gtopk(selected, SIZE, k)
    return total, dropped, {"threshold": smallest(total)}


def of_spardl(selected, k, step):
    workers, indices = len(selected), jnp.arange(SIZE, dtype=jnp.int32)
    owner = np.asarray(_hashed.row_and_owner(indices, SIZE, workers, jnp.int32(step))[1])
    total, kept, lengths = exchanges.spardl(selected, owner, k)
    useful = 2 * np.sum(lengths[:-1], axis=0) + 2 * (workers - 1) * np.asarray(lengths[-1])
    return total, kept, {"threshold": smallest(total), "overflow": 0, "useful": useful}


ORACLES = {
    "topk_a": of_topk_a,
    "sparse_allgather": of_sparse_allgather,
    "gtopk": of_gtopk,
    "spardl": of_spardl,
}


@pytest.mark.parametrize(
    ("name", "workers", "k", "steps"),
    [
        ("topk_a", 2, K, (0,)),
        *(("sparse_allgather", workers, K, (0, 1, 2)) for workers in (2, 5)),
        *slow_rows(
            ("topk_a", 5, K, (0,)),
            # If a selection is larger than k, its k largest entries take part.
            *(("gtopk", workers, k, (0,)) for workers, k in ((2, K), (3, K), (8, K), (3, 10))),
            # k is no multiple of 3, 7 and 8; a smaller selection takes part as a whole.
            *(("spardl", workers, K, (0, 5)) for workers in (3, 2, 5, 7, 8)),
            *(("spardl", *row, (0,)) for row in ((5, 3), (8, 3), (6, 13), (7, 1), (3, 81))),
        ),
    ],
)
def test_exchanges_are_those_of_their_papers(name, workers, k, steps):
    allreduce, rounds = table.make(name, k / SIZE), name in ("gtopk", "spardl")
    exact = name == "sparse_allgather"
    for step in steps:
        state = StepState(jnp.int32(step)) if name in ("sparse_allgather", "spardl") else None
        for case, acc in helpers.hard_accumulators(workers, SIZE).items():
            if case == "subnormal" and not exact:
                continue  # Sums of subnormals may be flushed to zero.
            out = helpers.run_once(SELECTOR, allreduce, acc, state)
            total, kept, info = ORACLES[name](as_entries(out["sent"]), k, step)
            np.testing.assert_array_equal(out["total"], np.tile(total, (workers, 1)), case)
            np.testing.assert_allclose(out["kept"], kept, rtol=1e-6 * rounds, err_msg=case)
            assert (np.asarray(out["info"].delivered) == np.count_nonzero(total)).all(), case
            for field, expected in info.items():
                found = getattr(out["info"], field)
                np.testing.assert_allclose(found, expected, rtol=1e-6 * rounds, err_msg=case)
            if case == "disjoint" and exact:
                assert not kept.any()


WITH_SPARCML = ("ssar_recursive_double", "ssar_split_allgather", "ring_sparse")


def exact_total(sent):
    return np.asarray(sent, np.float64).sum(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dense"), [("normal", True), ("same on all", False), ("one worker", False)]
)
def test_dense_regions_are_sent_where_the_union_passes_delta(case, dense):
    workers, size = 4, 400
    allreduce = table.make("dsar_split_allgather", slack=math.inf)
    acc = helpers.hard_accumulators(workers, size)[case]
    out = helpers.run_once(sc.select.topk(density=0.2), allreduce, acc)
    np.testing.assert_allclose(out["total"][0], exact_total(out["sent"]), atol=1e-5)
    assert not np.asarray(out["kept"]).any()
    # The size of each owner's sum, after the split of section 5.3.2.
    owned = np.asarray(out["sent"]).any(axis=0).reshape(workers, -1).sum(axis=1)
    assert (np.asarray(out["info"].delivered) == owned.sum()).all()
    # The forms: 25 pairs, 50 pairs (delta of section 5.1 for 100 values), and the 100 values.
    form = sum(owned.max() > slots for slots in (25, 50))
    assert (form == 2) == dense
    one_hot = tuple(float(i == form) for i in range(3))
    traffic = sc.traffic.of_allreduce(
        allreduce, size=size, capacity=80, axis_size=workers, frequencies={"form": one_hot}
    )
    assert float(out["info"].words[0]) == traffic.words


def test_dsar_switches_where_both_messages_have_the_same_words():
    """With 16-bit values a dense region is half as long, and delta half as large."""
    allreduce = sc.allreduce.published.dsar_split_allgather(slack=math.inf)

    def step(values, indices):
        state = StepState(jnp.int32(0))
        return allreduce.reduce(sc.PaddedCOO(values, indices, 1000), state, axis="w")

    for dtype, slots in ((jnp.float32, 125), (jnp.bfloat16, 62)):
        shapes = jax.ShapeDtypeStruct((400,), dtype), jax.ShapeDtypeStruct((400,), jnp.int32)
        given = {"axis": "w", "axis_size": 4, "frequencies": {"form": (1.0, 0.0)}}
        traffic = sc.traffic.of_function(step, *shapes, **given)
        assert traffic.collectives[-1].words == 2 * slots * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "density", "size"), [(7, 0.15, 203), (4, 0.15, 203), (3, 0.7, 203), (8, 0.5, 5)]
)
@pytest.mark.parametrize("name", WITH_SPARCML)
def test_sums_of_dense_streams(name, workers, density, size):
    """The switch is after some rounds, or before the first; with 5 indices, 3 owners have none."""
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
