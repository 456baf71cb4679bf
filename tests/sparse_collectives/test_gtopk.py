"""gTop-k: the tree, what it drops and who keeps it, and the broadcast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._parts import _broadcast
from tests.reference import gtopk as oracle
from tests.sparse_collectives import helpers

SIZE, DENSITY = 403, 0.05
K = round(DENSITY * SIZE)
SELECTOR = sc.select.topk(density=DENSITY)
GTOPK = sc.allreduce.gtopk(density=DENSITY)


def as_entries(vectors):
    return [{int(i): v[i] for i in np.flatnonzero(v)} for v in np.asarray(vectors)]


def check_against_the_oracle(allreduce, workers, k):
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        if name == "subnormal":
            continue  # sums of them may be flushed to zero
        out = helpers.run_once(SELECTOR, allreduce, acc)
        total, dropped = oracle.gtopk(as_entries(out["sent"]), SIZE, k)
        np.testing.assert_array_equal(out["total"], np.broadcast_to(total, acc.shape), name)
        np.testing.assert_allclose(out["kept"], dropped, rtol=1e-6, err_msg=name)
        threshold = np.abs(total[total != 0]).min(initial=np.inf)
        expected = 0 if np.isinf(threshold) else threshold
        assert (np.asarray(out["info"].threshold) == np.float32(expected)).all(), name
        assert (np.asarray(out["info"].delivered) <= k).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_it_is_the_tree_of_the_paper(workers):
    check_against_the_oracle(GTOPK, workers, K)


@pytest.mark.slow
def test_of_a_larger_selection_the_k_largest_take_part():
    check_against_the_oracle(sc.allreduce.gtopk(density=DENSITY / 2), 3, round(DENSITY / 2 * SIZE))


@pytest.mark.slow
def test_a_lossy_codec_loses_nothing():
    allreduce = sc.allreduce.gtopk(density=DENSITY, codec=helpers.lossy_codec())
    for name in ("normal", "one worker", "same on all"):
        acc = helpers.hard_accumulators(3, SIZE)[name]
        out = helpers.run_once(SELECTOR, allreduce, acc)
        total, sent, kept = (np.asarray(out[n], np.float64) for n in ("total", "sent", "kept"))
        np.testing.assert_allclose(sent.sum(0) - kept.sum(0), total[0], rtol=0, atol=1e-6)
        assert (total == total[0]).all()
        assert (total * 256 == np.round(total * 256)).all()
    assert np.asarray(out["info"].overflow).sum() > 0


@pytest.mark.parametrize("workers", helpers.WORKERS)
def test_the_broadcast_reaches_everyone_and_costs_what_it_says(workers):
    for length in (1, 7, 24):

        def send(message):
            return _broadcast.from_first(message, "workers")

        messages = np.arange(workers * length, dtype=np.int32).reshape(workers, length) - 5
        received = sc.simulate(send, axis_size=workers)(messages)
        np.testing.assert_array_equal(received, np.broadcast_to(messages[0], messages.shape))
        shape = jax.ShapeDtypeStruct((length,), jnp.int32)
        traffic = sc.traffic.of_function(send, shape, axis="workers", axis_size=workers)
        assert traffic.words == pytest.approx(_broadcast.words_received(length, workers))


@pytest.mark.slow
def test_words_stay_within_the_bound_of_the_paper():
    k = 1000
    allreduce = sc.allreduce.gtopk(density=0.01)
    for workers in (2, 4, 16, 64, 100):
        traffic = sc.traffic.of_allreduce(allreduce, size=100_000, capacity=k, axis_size=workers)
        by_scope = traffic.by_scope()
        assert by_scope["gtopk/reduce"] == pytest.approx(2 * k * (workers - 1) / workers)
        levels = (workers - 1).bit_length()
        # Scatter and allgather of blocks of whole words.
        block = -(-2 * k // workers)
        expected = block * (workers - 1) + block * 2**levels * levels / (2 * workers)
        assert by_scope["gtopk/broadcast"] <= expected + 1e-6
        assert traffic.words <= 4 * k * levels


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh_the_total_is_replicated(check_vma):
    helpers.check_replicated_on_a_mesh(SELECTOR, GTOPK, SIZE, check_vma=check_vma)
