"""The messages of the allreduces, and their words, are those of the papers' formulas.

Counted by the meter in traced programs. `test_cost_model_programs.py` compares the model with all
of them.
"""

import math

import jax.numpy as jnp
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce._shared import _halving
from sparse_collectives.transport import _dispatch
from tests.reference.sparcml import expected_union
from tests.sparse_collectives import helpers, table

N, K = 1000, 30


def messages(allreduce, workers, size=N, k=K):
    """``(kind, words)`` of each collective that is taken."""
    traffic = sc.traffic.of_allreduce(allreduce, size=size, capacity=k, axis_size=workers)
    return [(row.kind, row.words) for row in traffic.collectives if row.weight]


def slots_of_union(workers):
    return math.ceil(1.25 * expected_union(N, K, workers) / workers)


@pytest.mark.parametrize("name", ["topk_a", "sparse_allgather"])
def test_one_collective_of_the_pairs(name):
    for workers in (1, 2, 7, 1024):
        expected = [("all_gather", 2 * K * (workers - 1))] if workers > 1 else []
        assert messages(table.make(name), workers) == expected


@pytest.mark.parametrize("workers", [2, 7, 8, 16])
def test_recursive_doubling_has_log2_p_messages_that_double(workers):
    """At most k (P-1) pairs, the upper bound of section 5.3.1; two more where P is no power."""
    got = messages(table.make("ssar_recursive_double"), workers)
    stages = workers.bit_length() - 1
    surplus = workers - 2**stages
    if surplus:
        # Means over the workers, of which some receive nothing.
        assert len(got) == stages + 2
        assert got[0][1] == pytest.approx(2 * K * surplus / workers)
        assert got[-1][1] == pytest.approx(2 * K * surplus)
        return
    assert got == [("collective_permute", 2.0 * min(K * 2**t, N)) for t in range(stages)]
    assert sum(words for _, words in got) <= 2 * K * (workers - 1)
    bounded = messages(table.make("ssar_recursive_double", capacity=50), workers)
    assert [words for _, words in bounded] == [60, 100, 100, 100][:stages]


@pytest.mark.parametrize("workers", [2, 5, *helpers.slow(8)])
def test_the_ring_has_p_minus_one_messages_that_grow(workers):
    got = messages(table.make("ring_sparse", **table.ALL), workers)
    width = math.ceil(N / workers)
    # Pairs, or the dense region where these would be longer.
    steps = [("collective_permute", min(2.0 * K * (t + 1), width)) for t in range(workers - 1)]
    gather = ("all_gather", min(2.0 * K * workers, width) * (workers - 1))
    assert got == [*steps, gather]
    bounded = messages(table.make("ring_sparse"), workers)
    words = [words for _, words in bounded[:-1]]
    assert words == sorted(words)
    assert bounded[-1][1] == min(2 * slots_of_union(workers), width) * (workers - 1)


@pytest.mark.parametrize("workers", [2, 3, 64])
def test_split_and_allgather_are_two_collectives_of_the_expected_words(workers):
    got = messages(table.make("ssar_split_allgather"), workers)
    block, width = math.ceil(1.25 * K / workers), math.ceil(N / workers)
    slots = min(slots_of_union(workers), block * workers, width)
    assert got == [
        ("all_to_all", _dispatch.words_of_all_to_all(2 * block * workers, workers)),
        ("all_gather", _dispatch.words_of_all_gather(min(2 * slots, width), workers)),
    ]
    overlapping = messages(table.make("ssar_split_allgather", fill=1.0), workers)
    assert overlapping[1][1] == _dispatch.words_of_all_gather(2 * block, workers)


def test_a_union_that_can_not_pass_delta_needs_no_dense_form():
    got = messages(table.make("dsar_split_allgather", sparse_sizes=1), 4, k=40)
    # 4 blocks of 13 slots; a dense region has 250 words.
    assert got[-1] == ("all_gather", 2 * 4 * 13 * 3)


@pytest.mark.parametrize("codec", [sc.wire.raw, *helpers.slow(sc.wire.narrow16)])
@pytest.mark.parametrize("workers", [4, 6])
@pytest.mark.parametrize("name", ["ssar_recursive_double", "ssar_split_allgather", "ring_sparse"])
def test_no_message_of_sparcml_is_longer_than_a_dense_one(name, workers, codec):
    """Section 5.1: past delta a stream is dense, and a sum of it stays so."""
    codec = codec()
    whole = codec.encode_dense(jnp.zeros(N), jnp.uint32(0))[0].size
    region = codec.encode_dense(jnp.zeros(math.ceil(N / workers)), jnp.uint32(0))[0].size
    # Beside `all_gather` and `all_to_all`, whose messages are of regions.
    most = {"collective_permute": whole if name == "ssar_recursive_double" else region}
    for k in (30, 300, 1000):
        got = messages(table.make(name, codec=codec), workers, k=k)
        for kind, words in got:
            assert words <= most.get(kind, region * (workers - 1)), k
        # All of them are, where the selection is dense itself.
        if k == 1000 and workers == 4:
            assert all(w == most.get(kind, region * (workers - 1)) for kind, w in got)


@pytest.mark.parametrize(
    ("workers", "density", "codec"),
    [(3, 0.01, "raw")]
    + helpers.slow_rows(
        *((workers, 0.01, "raw") for workers in (2, 7, 8, 48, 1000)),
        *((workers, 1e-5, "raw") for workers in (3, 1000)),
        *((6, 0.01, codec) for codec in ("bf16", "narrow16", "narrow8")),
    ),
)
def test_spardl_has_log2_p_messages_and_an_allgather(workers, density, codec):
    size, k = 10**5, round(density * 10**5)
    got = messages(table.make("spardl", density, table.CODECS[codec]()), workers, size, k)
    slots, width = math.ceil(k / workers), math.ceil(size / workers)
    pairs = sc.cost_model._codecs.codec_sizes(codec).pairs(slots, width)
    assert sum(words for _, words in got) == 2 * (workers - 1) * pairs
    assert pairs == 2 * slots or codec != "raw"
    rounds = math.ceil(math.log2(workers))
    assert [kind for kind, _ in got] == ["collective_permute"] * rounds + ["all_gather"]


@pytest.mark.parametrize("workers", [*range(1, 18), 63, 64, 65, 100, 384, 1000, 1024])
def test_every_part_of_a_block_of_spardl_reaches_its_owner_once(workers):
    plan = _halving.make_plan(10**6, 10**4, workers, 10**4)
    # From whom the part of its own block at each distance came: it is the same for all.
    parts = [[0] for _ in range(workers)]
    for step in plan.rounds:
        assert step.blocks <= step.distance < len(parts) <= 2 * step.distance
        going, parts = parts[step.distance :], parts[: step.distance]
        assert len(going) == step.blocks
        for place, sources in enumerate(going):
            parts[place] += [source + step.distance for source in sources]
    assert len(parts) == 1
    assert sorted(parts[0]) == list(range(workers))


@pytest.mark.slow
def test_words_of_gtopk_stay_within_the_bound_of_the_paper():
    size, k = 100_000, 1000
    for workers in (2, 4, 16, 64, 100):
        got = messages(table.make("gtopk", 0.01), workers, size, k)
        assert sum(words for _, words in got) <= 4 * k * (workers - 1).bit_length()
