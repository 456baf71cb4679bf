"""`info.useful`: the received words that are not padding.

test_allreduce_contract.py checks for every allreduce that it never exceeds the words, and full and
empty messages; test_oracles.py compares an allgather and SparDL with their papers.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._ok_topk import _balance, _plan
from sparse_collectives.transport import _dispatch
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.table import DENSITY
from tests.sparse_collectives.test_allreduce_contract import SELECTOR, SIZE

K = round(DENSITY * SIZE)
ROOM = {"slack": math.inf, "fill": math.inf}


def occupancy(allreduce, acc):
    """Mean over the workers of the useful words, and the words."""
    info = helpers.run_once(SELECTOR, allreduce, acc)["info"]
    return np.asarray(info.useful, np.float64).mean(), float(info.words[0])


def normal(workers):
    return helpers.hard_accumulators(workers, SIZE)["normal"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 6])
def test_recursive_doubling_of_disjoint_selections_is_full(workers):
    acc = np.zeros((workers, SIZE), np.float32)
    for worker in range(workers):
        acc[worker, worker * K : (worker + 1) * K] = 1 + worker
    useful, words = occupancy(table.make("ssar_recursive_double"), acc)
    if workers == 4:
        assert useful == pytest.approx(words)
    else:
        # Two workers hand over K, so messages of 2 K slots have K or 2 K entries: 2, 2, 1, 1. Then
        # half of them have 4 K and half 2 K in slots for 4 K; the result is full.
        assert useful * workers == pytest.approx(2 * K * (2 + 6 + 2 * 4 + 2 * 2 + 2 * 6))


def selected_and_split(acc, width):
    """Each worker's selection, and the words of entries that go to the owners of their regions."""
    selected = np.asarray(helpers.run_once(SELECTOR, table.make("dense"), acc)["sent"]) != 0
    owner = np.arange(SIZE) // width
    leaving = sum(int((row & (owner != worker)).sum()) for worker, row in enumerate(selected))
    return selected, 2 * leaving


def test_useful_words_of_a_sum_that_goes_dense():
    workers, acc = 8, normal(8)
    width = -(-SIZE // workers)
    useful, _ = occupancy(table.make("ssar_split_allgather", **ROOM), acc)
    _, split = selected_and_split(acc, width)
    assert useful * workers == pytest.approx(split + width * workers * (workers - 1))


# With more workers the sums become dense.
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_useful_words_of_exact_pairs_are_two_for_each_entry(workers):
    acc, width = normal(workers), -(-SIZE // workers)
    selected, split = selected_and_split(acc, width)
    everything = int(selected.any(axis=0).sum())
    gathered = 2 * everything * (workers - 1)

    useful, _ = occupancy(table.make("ssar_split_allgather", **ROOM), acc)
    assert useful * workers == pytest.approx(split + gathered)

    useful, _ = occupancy(table.make("dsar_split_allgather", slack=math.inf), acc)
    # With a count from each worker, and perhaps dense regions.
    sent = useful * workers - split - workers * (workers - 1)
    dense = width * workers * (workers - 1)
    assert sent == pytest.approx(gathered) or sent == pytest.approx(dense)

    # Around the ring, region r starts at worker r + 1.
    passed = 0
    for region in range(workers):
        order = [(region + 1 + step) % workers for step in range(workers)]
        part = selected[order][:, region * width : (region + 1) * width]
        passed += sum(int(part[:m].any(axis=0).sum()) for m in range(1, workers))
    useful, _ = occupancy(table.make("ring_sparse", **ROOM), acc)
    assert useful * workers == pytest.approx(2 * passed + gathered)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "balance"), [(3, "auto"), (8, "always"), (3, "never")])
def test_useful_words_of_ok_topk(workers, balance):
    allreduce = table.make("ok_topk", slack=math.inf, regions="equal", balance=balance)
    out = helpers.run_once(SELECTOR, allreduce, normal(workers))
    selected = np.asarray(out["sent"]) != 0
    edges = np.array([worker * SIZE // workers for worker in range(workers + 1)])
    owner = np.searchsorted(edges, np.arange(SIZE), side="right") - 1
    leaving = sum(int((row & (owner != worker)).sum()) for worker, row in enumerate(selected))
    moved = 0
    if balance == "always":
        rank = np.cumsum(np.asarray(out["total"][0]) != 0) - 1
        places = np.flatnonzero(np.asarray(out["total"][0]))
        moved = int((rank[places] // -(-K // workers) != owner[places]).sum())
    fixed = _dispatch.words_of_all_gather(3, workers)
    fixed += sum(_dispatch.words_of_all_reduce(1 << width, workers) for _, width in _plan.digits(K))
    pairs = leaving + moved + K * (workers - 1)
    useful = np.asarray(out["info"].useful, np.float64).mean()
    assert useful == pytest.approx(fixed + 2 * pairs / workers, rel=1e-6)


def test_useful_words_of_every_way_to_balance():
    # 12 entries of 4 workers; 4 slots each in the allgather, 3 by rank.
    plan = _plan.make_plan(100, 12, 4, regions="equal")
    exchanges = _plan.exchanges(plan, lambda slots, size: 2 * slots).balance
    counts, none = jnp.array([7, 0, 4, 1], jnp.int32), jnp.zeros((), jnp.int32)
    words = [_balance.words_of_branches(exchanges, counts, me, plan, none) for me in range(4)]
    # Nothing; entries that flow on; the surplus; entries whose rank belongs to another worker.
    useful = [each.useful.tolist() for each in words]
    assert useful == [[0, 6, 6, 8], [0, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 0]]


@pytest.mark.slow
# (With qsgd the sums become dense.)
@pytest.mark.parametrize("name", ["bf16", "narrow16", "narrow8"])
def test_useful_words_with_a_codec_count_slots_alike(name):
    codec = table.CODECS[name]()
    useful, words = occupancy(table.make("topk_a", codec=codec), normal(4))
    assert useful == pytest.approx(words)
    shares = []
    for each in (sc.wire.raw(), codec):
        useful, words = occupancy(table.make("ssar_split_allgather", codec=each), normal(4))
        shares.append(useful / words)
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
