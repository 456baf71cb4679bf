"""SparCML: where a sum goes dense, how full a union is, and what finds no slot.

The sums themselves are in test_oracles.py, the messages in test_words.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._shared._step import StepState
from tests.reference import sparcml as oracle
from tests.sparse_collectives import helpers, table

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
    streams = oracle.as_streams(np.asarray(out["sent"]))
    assert oracle.is_dense(streams, size, 4, 4) == dense
    np.testing.assert_allclose(out["total"][0], exact_total(out["sent"]), atol=1e-5)
    assert not np.asarray(out["kept"]).any()
    assert (np.asarray(out["info"].delivered) == len(oracle.split_allgather(streams, size))).all()
    # Forms of 25 pairs, of 50 pairs (delta / P) and of 100 values.
    fullest = max(len(owned) for owned in oracle.split(streams, size))
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
