"""The cost model against the papers' tables, brute force, and the sizes of messages."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import cost_model
from sparse_collectives.allreduce._shared import _messages
from sparse_collectives.cost_model import Overlap, Workload
from sparse_collectives.cost_model._types import Cost, Network
from tests.sparse_collectives import helpers
from tests.sparse_collectives.helpers import slow_but

P_ALL = [1, 2, 3, 4, 5, 6, 8, 12, 100, 256, 1000]


def paper(name, n, k, workers, inner=1):
    return cost_model.paper_cost(name, Workload(n, k, workers, inner))


# By hand from Table 1 of Ok-Topk with n = 1000, k = 10, P = 8: log P = 3, (P-1)/P = 7/8.
TABLE_1 = {
    "dense": (6, 1750, 1750),
    # Two trees of three levels up and down, n / 2 each from two children and from two parents.
    "tree": (12, 2000, 2000),
    "topk_a": (3, 140, 140),
    "topk_dsa": (14, 35, 892.5),
    "gtopk": (6, 120, 120),
    "gaussian_k": (6, 140, 140),
    "ok_topk": (22, 17.5, 52.5),
    "spardl": (6, 35, 35),
    # SparCML, section 5.3, pairs of 2 words: [3, 7] k; [14/8, 8] k; 875 and 875 + 2k.
    "ssar_recursive_double": (3, 60, 140),
    "ssar_split_allgather": (10, 35, 160),
    "dsar_split_allgather": (10, 875, 895),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_the_papers_formulas_by_hand(name):
    messages, lower, upper = TABLE_1[name]
    estimate = paper(name, 1000, 10, 8)
    assert estimate.lower.messages == estimate.upper.messages == messages
    assert (estimate.lower.words, estimate.upper.words) == (lower, upper)


def test_the_papers_formula_for_two_levels_by_hand():
    # d = 800, rho d = 16, m = 4 nodes of n = 2: (7) 400 words, (9) 3*16/2, (10) 16*4/2.
    cost = paper("hierarchical", 800, 16, 8, inner=2).lower
    assert (cost.messages, cost.words) == (2, 24)
    assert (cost.inner_messages, cost.inner_words) == (1 + 1, 400 + 32)


def test_the_tree_between_nodes_by_hand():
    # 4 nodes of 2: trees of two levels; the two share 2n words. A chain of one message each way.
    cost = paper("tree", 800, 16, 8, inner=2).expected
    assert (cost.messages, cost.words) == (8, 800)
    assert (cost.inner_messages, cost.inner_words) == (2, 1600)
    # All in one node: nothing between nodes.
    cost = paper("tree", 800, 16, 8, inner=8).expected
    assert (cost.messages, cost.words, cost.inner_messages) == (0, 0, 14)


def test_folding_of_recursive_doubling():
    # P = 6: two workers fold into partners, four of them double twice, two get the result.
    estimate = paper("ssar_recursive_double", 1000, 10, 6)
    assert estimate.lower.messages == 4
    assert estimate.lower.words == 2 * 10 * 4
    # k, then 2k and 4k, then 6k at the end.
    assert estimate.upper.words == 2 * 10 * (1 + 2 + 4 + 6)


@pytest.mark.parametrize("name", cost_model._paper.PAPER)
@pytest.mark.parametrize("workers", P_ALL)
def test_the_papers_bounds_are_ordered(name, workers):
    for k in (1, 7, 500, 1000):
        lower, _, upper = paper(name, 1000, k, workers)
        assert 0 <= lower.words <= upper.words
        if workers == 1:
            assert upper == Cost()
        else:
            assert upper.messages > 0


@pytest.mark.parametrize("name", cost_model.ALGORITHMS)
@pytest.mark.parametrize("codec", cost_model._codecs.CODECS)
def test_predictions_are_ordered_and_one_worker_exchanges_nothing(name, codec):
    for workers in P_ALL:
        for k in (1, 7, 500, 1000):
            lower, expected, upper = cost_model.predict(name, Workload(1000, k, workers), codec)
            assert 0 <= lower.words <= expected.words <= upper.words
            assert lower.words <= lower.path_words
            if workers == 1:
                assert upper.words == upper.messages == upper.pairs == 0


TWO_LEVELS = [name for name in cost_model.ALGORITHMS if name[:5] in ("torus", "hiera")]


@pytest.mark.parametrize("name", TWO_LEVELS)
def test_two_levels_degenerate_to_one(name):
    load, inner = Workload(1000, 10, 8), Workload(1000, 10, 8, 8)
    flat = {"torus_2d": "dense"}.get(name, name.rstrip(")").split("(")[-1])
    assert cost_model.predict(name, load) == cost_model.predict(flat, load)
    alone = cost_model.predict(name, inner).expected
    assert alone.words == alone.messages == 0
    # Reduce-scatter and allgather of all n; three words for the info, and three that are summed.
    info = 0 if name == "torus_2d" else 3 * 7
    agreed = 2 * 3 * 7 / 8 if "ok_topk" in name else 0
    assert alone.inner_words == 2 * 1000 * 7 / 8 + info + agreed


# Fill-in.


@pytest.mark.parametrize(("n", "k", "workers"), [(512, 64, 4), (1000, 3, 50), (2000, 400, 7)])
def test_expected_union_is_that_of_a_simulation(n, k, workers):
    rng = np.random.default_rng(0)
    unions = [
        np.unique(np.concatenate([rng.choice(n, k, replace=False) for _ in range(workers)])).size
        for _ in range(400)
    ]
    error = 4 * np.std(unions) / math.sqrt(len(unions))
    assert abs(np.mean(unions) - cost_model.expected_union(n, k, workers)) <= error


def test_expected_union_is_the_sum_of_the_papers_appendix():
    n, k, workers = 512, 100, 12
    terms = [(-1) ** (i - 1) * math.comb(workers, i) * (k / n) ** i for i in range(1, workers + 1)]
    assert cost_model.expected_union(n, k, workers) == pytest.approx(n * sum(terms), rel=1e-12)


def test_expected_union_limits():
    union = cost_model.expected_union
    assert union(10, 10, 1) == union(10, 10, 1000) == 10
    assert union(1000, 7, 1) == pytest.approx(7, rel=1e-14)
    # (1 - k/n)^P in float64 would be 1: no digits left.
    assert union(10**18, 1, 1000) == pytest.approx(1000, rel=1e-12)
    assert union(10**6, 1, 10**9) == pytest.approx(10**6, rel=1e-12)


def test_overlap_interpolates_and_extrapolates_by_an_effective_size():
    # Selections within 5000 of 10^6 places, as if the gradient were that short.
    for workers in (2, 16):
        union = cost_model.expected_union(5000, 1000, workers)
        overlap = Overlap(union, workers)
        assert cost_model._fill_in.effective_size(1000, overlap) == pytest.approx(5000, rel=1e-6)
        for others in (3, 64):
            found = cost_model.expected_union(10**6, 1000, others, overlap=overlap)
            assert found == pytest.approx(cost_model.expected_union(5000, 1000, others), rel=1e-6)


def test_overlap_limits():
    same, disjoint = Overlap(100, 4), Overlap(400, 4)
    assert cost_model.expected_union(10**4, 100, 64, overlap=same) == pytest.approx(100)
    assert cost_model.expected_union(10**4, 100, 64, overlap=disjoint) == 6400
    assert cost_model.expected_union(10**4, 100, 200, overlap=disjoint) == 10**4
    for bad in (Overlap(99, 4), Overlap(401, 4), Overlap(100, 1)):
        with pytest.raises(ValueError, match="overlap"):
            cost_model.expected_union(10**4, 100, 8, overlap=bad)


def test_fill_in_orders_ssar_by_overlap():
    near = Workload(10**6, 10**4, 64, overlap=Overlap(12_000, 2))
    far = Workload(10**6, 10**4, 64)
    words = [cost_model.predict("ssar_split_allgather", w).expected.words for w in (near, far)]
    assert words[0] < words[1]


# Codecs.


@pytest.mark.parametrize("density", [1e-4, 0.002, 0.01, 0.3])
def test_escapes_are_those_of_simulated_gaps(density):
    rng = np.random.default_rng(1)
    gaps = rng.geometric(density, 400_000)
    for name in ("narrow8", "narrow16"):
        codec = cost_model._codecs.codec_sizes(name)
        simulated = np.asarray(codec.gaps.escapes(jnp.asarray(gaps, jnp.int32))).mean()
        expected = cost_model._codecs.escapes_per_pair(codec, density)
        assert simulated == pytest.approx(expected, rel=0.05, abs=2e-3)


def test_escapes_have_limits():
    narrow16, narrow8 = (cost_model._codecs.codec_sizes(name) for name in ("narrow16", "narrow8"))
    assert cost_model._codecs.escapes_per_pair(narrow16, 1.0) == 0
    assert cost_model._codecs.escapes_per_pair(narrow16, 0.5) == pytest.approx(0)
    assert cost_model._codecs.escapes_per_pair(narrow8, 1e-9) == pytest.approx(3, rel=0.02)
    assert cost_model._codecs.escapes_per_pair(cost_model._codecs.codec_sizes("raw"), 1e-9) == 0
    assert cost_model._codecs.has_room(narrow8, 0.01)
    assert not cost_model._codecs.has_room(narrow8, 0.005)
    assert cost_model._codecs.has_room(narrow16, 1e-4)
    assert not cost_model._codecs.has_room(narrow16, 1e-5)


@pytest.mark.parametrize("name", slow_but(("raw", "bf16", "qsgd"), cost_model._codecs.CODECS))
def test_sizes_are_those_of_the_messages(name):
    codec, sizes = getattr(sc.wire, name)(), cost_model._codecs.codec_sizes(name)
    assert codec.exact == sizes.exact
    for size in (1, 300, 10**5, 2**31 - 1):
        for slots in (1, 2, 3, 7, 128, 1000, 1025):
            words = _messages.pair_words(codec, slots, size, jnp.float32)
            assert sizes.pairs(slots, size) == words, (size, slots)
    for length in (1, 2, 3, 127, 512, 1000):
        assert sizes.dense(length) == _messages.dense_words(codec, length, jnp.float32)


def test_the_codecs_of_the_model_are_those_of_the_wire():
    assert set(cost_model._codecs.CODECS) == set(helpers.CODECS)


def test_the_dense_limit_is_half_for_pairs_of_two_words():
    assert cost_model._paper.sparse_limit(1000) == 500


# Costs and arguments.


def test_seconds_count_the_longest_path():
    cost = Cost(messages=3, words=10, path_words=40, inner_messages=2, inner_words=5)
    assert cost.seconds(Network(1.0, 0.5, 0.1, 0.01)) == pytest.approx(3 + 20 + 0.2 + 0.05)
    total = cost + cost
    assert (total.messages, total.path_words, total.inner_words) == (6, 80, 10)


def test_units():
    net = cost_model.network("5us", "25Gbit", inner_latency="1ms", inner_bandwidth="3GB/s")
    assert net == pytest.approx((5e-6, 4 * 8 / 25e9, 1e-3, 4 / 3e9))
    assert cost_model.network(2.0, 4.0) == (2.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((0, 1, 1), "size"), ((10, 11, 1), "selected"), ((10, 0, 1), "selected")]
    + [((10, 1, 0), "workers"), ((10, 1, 8, 3), "inner_size")],
)
def test_bad_workloads_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        Workload(*arguments)


def test_unknown_names_are_answered_with_the_known_ones():
    load = Workload(10, 1, 2)
    for call in (cost_model.paper_cost, cost_model.predict):
        with pytest.raises(ValueError, match="name must be one of dense"):
            call("bogus", load)
    with pytest.raises(ValueError, match="codec must be one of raw"):
        cost_model.predict("dense", load, "bogus")
