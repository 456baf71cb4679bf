"""`info.useful`: what of the words received is no padding."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _volumes
from sparse_collectives.allreduce.ok_topk import _balance, _plan
from tests.sparse_collectives import helpers
from tests.sparse_collectives.table import ALLREDUCES, DENSITY
from tests.sparse_collectives.test_allreduce_contract import SELECTOR, SIZE

K = round(DENSITY * SIZE)
QUICK = ("leader", "dense", "dense_bucketed", "topk_a", "topk_a, lossy", "sparse_allgather")
QUICK += ("ssar_split_allgather, room for all",)
# The messages are those of another one, with other entries in them.
ALIKE = (
    "ok_topk, equal regions",
    "ok_topk, no slack",
    "ok_topk, balanced regions",
    "auto, ok_topk",
)
# All that these send are pairs.
PAIRS_ONLY = ("topk_a", "sparse_allgather", "gtopk", "spardl", "ssar_split_allgather")
PAIRS_ONLY += ("ring_sparse",)


def occupancy(allreduce, acc, selector=SELECTOR):
    """Mean over the workers of the useful words, and the words."""
    info = helpers.run_once(selector, allreduce, acc)["info"]
    return np.asarray(info.useful, np.float64).mean(), float(info.words[0])


def normal(workers):
    return helpers.hard_accumulators(workers, SIZE)["normal"]


@pytest.mark.parametrize(
    "name", helpers.slow_but(QUICK, [name for name in ALLREDUCES if name not in ALIKE])
)
def test_no_more_is_useful_than_is_received(name):
    accumulators = helpers.hard_accumulators(3, SIZE)
    for case in ("normal", "all zero", "one region", "one worker"):
        useful, words = occupancy(ALLREDUCES[name].allreduce, accumulators[case])
        assert 0 <= useful <= words * (1 + 1e-6), case
        if case == "all zero" and name in PAIRS_ONLY:
            assert useful == 0


@pytest.mark.slow
def test_one_worker_receives_nothing_useful():
    for name in ("ok_topk", "topk_a", "gtopk", "ring_sparse"):
        assert occupancy(ALLREDUCES[name].allreduce, normal(1)) == (0, 0)


@pytest.mark.parametrize(
    "name", ["dense", "dense_bucketed", "topk_a", "sparse_allgather", *helpers.slow("gtopk")]
)
@pytest.mark.parametrize("workers", [3, 8])
def test_full_messages_have_no_padding(name, workers):
    useful, words = occupancy(ALLREDUCES[name].allreduce, normal(workers))
    assert useful == pytest.approx(words, rel=1e-6)
    assert words > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 6])
def test_recursive_doubling_of_disjoint_selections_is_full(workers):
    acc = np.zeros((workers, SIZE), np.float32)
    for worker in range(workers):
        acc[worker, worker * K : (worker + 1) * K] = 1 + worker
    useful, words = occupancy(sc.allreduce.published.ssar_recursive_double(), acc)
    if workers == 4:
        assert useful == pytest.approx(words)
    else:
        # Two hand over K, so that messages of 2 K slots have K or 2 K: 2, 2, 1, 1; then half are
        # 4 K and half 2 K in slots for 4 K; the result is full.
        assert useful * workers == pytest.approx(2 * K * (2 + 6 + 2 * 4 + 2 * 2 + 2 * 6))


def pairs_sent_by_split(selected, width):
    """Entries that leave their worker when each region has an owner."""
    owner = np.arange(SIZE) // width
    return sum(int((row & (owner != worker)).sum()) for worker, row in enumerate(selected))


def test_a_sum_that_goes_dense_is_full():
    workers, acc = 8, normal(8)
    selected = np.asarray(helpers.run_once(SELECTOR, sc.allreduce.dense(), acc)["sent"]) != 0
    width = -(-SIZE // workers)
    allreduce = sc.allreduce.published.ssar_split_allgather(slack=math.inf, fill=math.inf)
    useful, _ = occupancy(allreduce, acc)
    split = 2 * pairs_sent_by_split(selected, width)
    assert useful * workers == pytest.approx(split + width * workers * (workers - 1))


# With more workers the sums go dense.
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_with_exact_pairs_the_useful_words_are_two_for_each_entry(workers):
    acc = normal(workers)
    selected = np.asarray(helpers.run_once(SELECTOR, sc.allreduce.dense(), acc)["sent"]) != 0
    width = -(-SIZE // workers)
    everything = int(selected.any(axis=0).sum())
    split = pairs_sent_by_split(selected, width)
    room = {"slack": math.inf, "fill": math.inf}

    useful, _ = occupancy(sc.allreduce.published.ssar_split_allgather(**room), acc)
    assert useful * workers == pytest.approx(2 * (split + everything * (workers - 1)))

    useful, words = occupancy(sc.allreduce.published.dsar_split_allgather(slack=math.inf), acc)
    gathered = 2 * everything * (workers - 1)
    counts = workers * (workers - 1)
    dense = width * workers * (workers - 1)
    sent = useful * workers - 2 * split - counts
    assert sent == pytest.approx(gathered) or sent == pytest.approx(dense)

    # Around the ring, region r starts at worker r + 1.
    passed = 0
    for region in range(workers):
        order = [(region + 1 + step) % workers for step in range(workers)]
        part = selected[order][:, region * width : (region + 1) * width]
        passed += sum(int(part[:m].any(axis=0).sum()) for m in range(1, workers))
    useful, _ = occupancy(sc.allreduce.published.ring_sparse(**room), acc)
    assert useful * workers == pytest.approx(2 * (passed + everything * (workers - 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "balance"), [(3, "auto"), (8, "always"), (3, "never")])
def test_the_useful_words_of_ok_topk(workers, balance):
    acc = normal(workers)
    allreduce = sc.allreduce.ok_topk(
        density=DENSITY, slack=math.inf, regions="equal", balance=balance
    )
    out = helpers.run_once(SELECTOR, allreduce, acc)
    selected = np.asarray(out["sent"]) != 0
    edges = np.array([worker * SIZE // workers for worker in range(workers + 1)])
    owner = np.searchsorted(edges, np.arange(SIZE), side="right") - 1
    leaving = sum(int((row & (owner != worker)).sum()) for worker, row in enumerate(selected))
    moved = 0
    if balance == "always":
        rank = np.cumsum(np.asarray(out["total"][0]) != 0) - 1
        places = np.flatnonzero(np.asarray(out["total"][0]))
        moved = int((rank[places] // -(-K // workers) != owner[places]).sum())
    fixed = _volumes.all_gather(3, workers)
    fixed += sum(_volumes.all_reduce(1 << width, workers) for _, width in _plan.digits(K))
    pairs = leaving + moved + K * (workers - 1)
    useful = np.asarray(out["info"].useful, np.float64).mean()
    assert useful == pytest.approx(fixed + 2 * pairs / workers, rel=1e-6)


def test_every_way_to_balance_counts_what_it_moves():
    # 12 entries of 4 workers; 4 slots each in the allgather, 3 by rank.
    plan = _plan.make_plan(100, 12, 4, regions="equal")
    assert (plan.gather_slots, plan.rank_slots) == (4, 3)
    exchanges = _plan.exchanges(plan, lambda slots, size: 2 * slots).balance
    counts = jnp.array([7, 0, 4, 1], jnp.int32)
    none = jnp.zeros((), jnp.int32)
    words = [_balance.words_of_branches(exchanges, counts, me, plan, none) for me in range(4)]
    # Nothing; what flows on; the surplus; those whose rank belongs to another worker.
    useful = [each.useful.tolist() for each in words]
    assert useful == [[0, 6, 6, 8], [0, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 0]]
    # Two words for each slot, of which those for others count.
    received = [0, 2 * plan.neighbour_slots, 2 * 3 * plan.spread_slots, 2 * 9]
    assert words[0].received.tolist() == received


@pytest.mark.slow
# (With qsgd the sums go dense.)
@pytest.mark.parametrize("name", ["bf16", "narrow16", "narrow8"])
def test_with_a_codec_slots_count_alike(name):
    codec = getattr(sc.wire, name)()
    useful, words = occupancy(sc.allreduce.topk_a(codec=codec), normal(4))
    assert useful == pytest.approx(words)
    shares = []
    for each in (sc.wire.raw(), codec):
        useful, words = occupancy(
            sc.allreduce.published.ssar_split_allgather(codec=each), normal(4)
        )
        shares.append(useful / words)
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
