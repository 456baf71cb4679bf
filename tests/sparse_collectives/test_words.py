"""The messages of the allreduces, and their words, are those of the papers' formulas.

Counted by the meter in traced programs. `test_cost_model.py` compares the model with all of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _volumes
from sparse_collectives.allreduce._shared import _broadcast, _halving
from tests.reference.sparcml import expected_union
from tests.sparse_collectives import helpers, table

N, K = 1000, 30


def traffic_of(allreduce, workers, size=N, k=K, **options):
    return sc.traffic.of_allreduce(allreduce, size=size, capacity=k, axis_size=workers, **options)


def messages(allreduce, workers, size=N, k=K, **options):
    """``(kind, words)`` of each collective that is taken."""
    traffic = traffic_of(allreduce, workers, size, k, **options)
    return [(row.kind, row.words) for row in traffic.collectives if row.weight]


@pytest.mark.parametrize("name", ["topk_a", "sparse_allgather"])
def test_one_collective_of_the_pairs(name):
    for workers in (1, 2, 7, 1024):
        expected = [("all_gather", 2 * K * (workers - 1))] if workers > 1 else []
        assert messages(table.make(name), workers) == expected


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_recursive_doubling_has_log2_p_messages_that_double(workers):
    """At most k (P-1) pairs, the upper bound of section 5.3.1."""
    got = messages(table.make("ssar_recursive_double"), workers)
    stages = workers.bit_length() - 1
    assert got == [("collective_permute", 2.0 * min(K * 2**t, N)) for t in range(stages)]
    assert sum(words for _, words in got) <= 2 * K * (workers - 1)


@pytest.mark.parametrize(("workers", "rounds"), [(3, 1), (5, 2), (6, 2), (7, 2)])
def test_surplus_workers_take_two_more_messages(workers, rounds):
    got = messages(table.make("ssar_recursive_double"), workers)
    surplus = workers - 2**rounds
    assert len(got) == rounds + 2
    # Means over the workers, of which some receive nothing.
    assert got[0][1] == pytest.approx(2 * K * surplus / workers)
    assert got[-1][1] == pytest.approx(2 * K * surplus)


def test_a_bound_keeps_the_messages_of_recursive_doubling_short():
    got = messages(table.make("ssar_recursive_double", capacity=50), 16)
    assert [words for _, words in got] == [60, 100, 100, 100]


@pytest.mark.parametrize("workers", [2, 3, 5, *helpers.slow(8)])
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
    union = math.ceil(1.25 * expected_union(N, K, workers) / workers)
    assert bounded[-1][1] == min(2 * union, width) * (workers - 1)


@pytest.mark.parametrize("workers", [2, 3, 8, 64])
def test_split_and_allgather_are_two_collectives_of_the_expected_words(workers):
    got = messages(table.make("ssar_split_allgather"), workers)
    block, width = math.ceil(1.25 * K / workers), math.ceil(N / workers)
    union = math.ceil(1.25 * expected_union(N, K, workers) / workers)
    slots = min(union, block * workers, width)
    assert got == [
        ("all_to_all", _volumes.all_to_all(2 * block * workers, workers)),
        ("all_gather", _volumes.all_gather(min(2 * slots, width), workers)),
    ]
    overlapping = messages(table.make("ssar_split_allgather", fill=1.0), workers)
    assert overlapping[1][1] == _volumes.all_gather(2 * block, workers)


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


@pytest.mark.parametrize("workers", [3, *helpers.slow(2, 5, 7, 8, 48, 1000)])
@pytest.mark.parametrize("density", [0.01, *helpers.slow(1e-5)])
def test_spardl_has_log2_p_messages_and_an_allgather(density, workers):
    size, k = 10**5, round(density * 10**5)
    got = messages(table.make("spardl", density), workers, size, k)
    assert sum(words for _, words in got) == 4 * math.ceil(k / workers) * (workers - 1)
    rounds = math.ceil(math.log2(workers))
    assert [kind for kind, _ in got] == ["collective_permute"] * rounds + ["all_gather"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "narrow16", "narrow8"])
def test_a_codec_encodes_every_message_of_spardl(name):
    workers, size, density = 6, 10**5, 0.01
    allreduce = table.make("spardl", density, table.CODECS[name]())
    slots, width = math.ceil(density * size / workers), math.ceil(size / workers)
    pairs = sc.cost_model._codecs.codec_sizes(name).pairs(slots, width)
    words = traffic_of(allreduce, workers, size, round(density * size)).words
    assert words == 2 * (workers - 1) * pairs


@pytest.mark.parametrize("workers", [*range(1, 70), 100, 384, 1000, 1024])
def test_every_part_of_a_block_of_spardl_reaches_its_owner_once(workers):
    plan = _halving.make_plan(10**6, 10**4, workers, 10**4)
    assert len(plan.rounds) == math.ceil(math.log2(workers))
    assert sum(step.blocks for step in plan.rounds) == workers - 1
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


@pytest.mark.parametrize("workers", helpers.WORKERS)
def test_the_broadcast_of_gtopk_reaches_everyone_and_costs_what_it_says(workers):
    def send(message):
        return _broadcast.from_first(message, "workers")

    for length in (1, 7, 24):
        messages = np.arange(workers * length, dtype=np.int32).reshape(workers, length) - 5
        received = sc.simulate(send, axis_size=workers)(messages)
        np.testing.assert_array_equal(received, np.broadcast_to(messages[0], messages.shape))
        shape = jax.ShapeDtypeStruct((length,), jnp.int32)
        traffic = sc.traffic.of_function(send, shape, axis="workers", axis_size=workers)
        assert traffic.words == pytest.approx(_broadcast.words_received(length, workers))


@pytest.mark.slow
def test_words_of_gtopk_stay_within_the_bound_of_the_paper():
    size, k = 100_000, 1000
    for workers in (2, 4, 16, 64, 100):
        traffic = traffic_of(table.make("gtopk", 0.01), workers, size, k)
        by_scope = traffic.by_scope()
        assert by_scope["gtopk/reduce"] == pytest.approx(2 * k * (workers - 1) / workers)
        levels = (workers - 1).bit_length()
        # Scatter and allgather of blocks of whole words.
        block = -(-2 * k // workers)
        expected = block * (workers - 1) + block * 2**levels * levels / (2 * workers)
        assert by_scope["gtopk/broadcast"] <= expected + 1e-6
        assert traffic.words <= 4 * k * levels
