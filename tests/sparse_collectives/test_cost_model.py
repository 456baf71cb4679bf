"""The cost model against the papers' tables, brute force, and the sizes of messages."""

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import cost_model
from sparse_collectives.allreduce._parts import _messages
from sparse_collectives.cost_model import Overlap, Workload
from sparse_collectives.cost_model._costs import Cost, Network
from tests.sparse_collectives import helpers
from tests.sparse_collectives.helpers import slow_but


def paper(name, n, k, workers, inner=1):
    return cost_model.paper_cost(name, Workload(n, k, workers, inner))


def predicted(name, codec, n, k, workers):
    return cost_model.predict(name, Workload(n, k, workers), codec)


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


N_K_P = (1000, 10, 8)
BY_HAND = [(name, N_K_P, row) for name, row in TABLE_1.items()]
# P = 6: two fold into partners, four double twice, two get the result; upper: k, 2k, 4k, 6k.
FOLDED = 2 * 10 * (1 + 2 + 4 + 6)
BY_HAND += [
    ("ssar_recursive_double", (1000, 10, 6), (4, 2 * 10 * 4, FOLDED)),
    # d = 800, rho d = 16, m = 4 nodes of n = 2: (7) 400 words, (9) 3*16/2, (10) 16*4/2. The upper
    # cost has an index for each value.
    ("hierarchical", (800, 16, 8, 2), (2, 24, 48, 1 + 1, 400 + 32)),
    # Trees of two levels; the two share 2n words. A chain of one message each way.
    ("tree", (800, 16, 8, 2), (8, 800, 800, 2, 1600)),
]


@pytest.mark.parametrize(("name", "load", "expected"), BY_HAND)
def test_paper_costs_by_hand(name, load, expected):
    messages, lower, upper, *inside = expected
    estimate = paper(name, *load)
    assert estimate.lower.messages == estimate.upper.messages == messages
    assert (estimate.lower.words, estimate.upper.words) == (lower, upper)
    assert [estimate.lower.inner_messages, estimate.lower.inner_words] == (inside or [0, 0])


NAMES = [(paper, (name,)) for name in cost_model._paper.PAPER]
NAMES += [
    (predicted, (name, codec))
    for name in cost_model.ALGORITHMS
    for codec in cost_model._codecs.CODECS
]


@pytest.mark.parametrize(("estimate", "what"), NAMES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_bounds_are_ordered_and_one_worker_exchanges_nothing(estimate, what):
    for workers in (1, 2, 3, 6, 8, 100, 1000):
        for k in (1, 7, 500, 1000):
            lower, expected, upper = estimate(*what, 1000, k, workers)
            assert 0 <= lower.words <= expected.words <= upper.words
            assert lower.words <= lower.path_words <= expected.path_words <= upper.path_words
            assert lower.messages <= expected.messages <= upper.messages
            nothing = upper.words == upper.messages == upper.pairs == 0
            assert nothing == (workers == 1)


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


def test_expected_union_is_the_sum_of_the_papers_appendix_and_that_of_a_simulation():
    n, k, workers = 512, 64, 12
    terms = [(-1) ** (i - 1) * math.comb(workers, i) * (k / n) ** i for i in range(1, workers + 1)]
    expected = cost_model.expected_union(n, k, workers)
    assert expected == pytest.approx(n * sum(terms), rel=1e-12)
    rng = np.random.default_rng(0)
    unions = [
        np.unique(np.concatenate([rng.choice(n, k, replace=False) for _ in range(workers)])).size
        for _ in range(400)
    ]
    error = 4 * np.std(unions) / math.sqrt(len(unions))
    assert abs(np.mean(unions) - expected) <= error
    # (1 - k/n)^P in float64 would be 1: no digits left.
    assert cost_model.expected_union(10**18, 1, 1000) == pytest.approx(1000, rel=1e-12)


def test_overlap_interpolates_and_extrapolates_by_an_effective_size():
    union = functools.partial(cost_model.expected_union, 10**6, 1000)
    # Selections within 5,000 of 10^6 places, as if the gradient were that short.
    for workers, others in itertools.product((2, 16), (3, 64)):
        overlap = Overlap(cost_model.expected_union(5000, 1000, workers), workers)
        expected = cost_model.expected_union(5000, 1000, others)
        assert union(others, overlap=overlap) == pytest.approx(expected, rel=1e-6)
    same, disjoint = Overlap(1000, 4), Overlap(4000, 4)
    assert union(64, overlap=same) == pytest.approx(1000)
    assert union(64, overlap=disjoint) == 64_000
    assert union(2000, overlap=disjoint) == 10**6
    for bad in (Overlap(999, 4), Overlap(4001, 4), Overlap(1000, 1)):
        with pytest.raises(ValueError, match="overlap"):
            union(8, overlap=bad)


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


@pytest.mark.parametrize("name", slow_but(("raw", "bf16", "qsgd"), helpers.CODECS))
def test_sizes_are_those_of_the_messages(name):
    codec, sizes = getattr(sc.wire, name)(), cost_model._codecs.codec_sizes(name)
    assert codec.exact == sizes.exact
    for size in (1, 300, 10**5, 2**31 - 1):
        for slots in (1, 2, 3, 7, 128, 1000, 1025):
            words = _messages.pair_words(codec, slots, size, jnp.float32)
            assert sizes.pairs(slots, size) == words, (size, slots)
    for length in (1, 2, 127, 1000):
        assert sizes.dense(length) == _messages.dense_words(codec, length, jnp.float32)


# Costs and arguments.


def test_seconds_count_the_longest_path():
    cost = Cost(messages=3, words=10, path_words=40, inner_messages=2, inner_words=5)
    assert cost.seconds(Network(1.0, 0.5, 0.1, 0.01)) == pytest.approx(3 + 20 + 0.2 + 0.05)
    total = cost + cost
    assert (total.messages, total.path_words, total.inner_words) == (6, 80, 10)


def test_network_of_texts_and_of_numbers():
    net = cost_model.network("5us", "25Gbit", inner_latency="1ms", inner_bandwidth="3GB/s")
    assert net == pytest.approx((5e-6, 4 * 8 / 25e9, 1e-3, 4 / 3e9))
    assert cost_model.network(2.0, 4.0) == (2.0, 1.0, 0.0, 0.0)
