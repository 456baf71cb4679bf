"""The allreduces of SparCML and the sparse ring against their oracles.

Conservation, replica equality and the rest of the contract are tested for all
allreduces in test_allreduce_contract; its compiled steps are used here again.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _volumes
from sparse_collectives.allreduce._parts import _merge, _slots
from tests.reference import sparcml as oracle
from tests.reference import windows
from tests.sparse_collectives import helpers
from tests.sparse_collectives.test_allreduce_contract import ALLREDUCES, SELECTOR, SIZE

K = 20  # entries of SELECTOR out of SIZE
NAMES = {
    "ssar_recursive_double": "ssar_recursive_double",
    "ssar_split_allgather": "ssar_split_allgather, room for all",
    "ring_sparse": "ring_sparse",
}
DYNAMIC = sc.allreduce.dsar_split_allgather(slack=math.inf, sparse_sizes=2)
WIDE = sc.select.topk(density=0.2)
CROWDING = sc.select.topk(density=0.15)


def exact_total(sent):
    return np.asarray(sent, np.float64).sum(axis=0)


def conserved(out):
    """Whether nothing is lost and all workers have the same bits."""
    total = np.asarray(out["total"])
    sent, kept = np.asarray(out["sent"], np.float64), np.asarray(out["kept"], np.float64)
    assert (total.view(np.int32) == total[:1].view(np.int32)).all()
    scale = np.abs(sent).sum(axis=0) + np.abs(kept).sum(axis=0) + 1e-30
    return (np.abs(sent.sum(axis=0) - kept.sum(axis=0) - total[0]) / scale).max() < 1e-6


def has_words_of_program(out, allreduce, size, capacity, at_most=False):
    words = np.asarray(out["info"].words)
    traffic = sc.traffic.of_allreduce(
        allreduce, size=size, capacity=capacity, axis_size=len(words)
    ).words
    assert (words == words[0]).all()
    assert words[0] <= traffic if at_most else words[0] == pytest.approx(traffic)


# Equality with the oracles, which follow the paper message by message.


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_total_is_that_of_the_paper_and_of_the_dense_sum(name, workers):
    allreduce, delivers_all = ALLREDUCES[NAMES[name]]
    assert delivers_all
    for case, acc in helpers.hard_accumulators(workers, SIZE).items():
        if case == "subnormal":
            continue  # sums of these may be flushed to zero
        out = helpers.run_once(SELECTOR, allreduce, acc)
        streams = oracle.as_streams(np.asarray(out["sent"]))
        if name == "ssar_recursive_double":
            stream = oracle.recursive_double(streams)[0][0]
        elif name == "ring_sparse":
            stream = oracle.ring(streams, SIZE)[0]
        else:
            stream = oracle.split_allgather(streams, SIZE)
        scale = np.abs(acc).max() * 1e-6
        for expected in (oracle.as_vector(stream, SIZE), exact_total(out["sent"])):
            np.testing.assert_allclose(out["total"][0], expected, atol=scale, err_msg=case)
        # Where a sum is dense, values that add up to 0 are no entries.
        entries = (len(stream), np.count_nonzero(out["total"][0]))
        assert np.isin(out["info"].delivered, entries).all(), case
        assert not np.asarray(out["kept"]).any(), case
    has_words_of_program(out, allreduce, SIZE, K)


@pytest.mark.parametrize("workers", [3, 5, 6, 7, 8])
def test_oracles_agree_with_each_other(workers):
    streams = oracle.as_streams(
        np.where(np.random.default_rng(workers).random((workers, 57)) < 0.2, 1.0, 0.0)
    )
    held, rounds = oracle.recursive_double(streams)
    total, steps = oracle.ring(streams, 57)
    expected = oracle.split_allgather(streams, 57)
    assert all(stream == expected for stream in held)
    assert total == expected
    assert len(steps) == workers - 1
    fold = 0 if workers == 8 else 2
    assert len(rounds) == math.floor(math.log2(workers)) + fold


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "dsar_split_allgather"])
def test_density_one_is_psum(name):
    """Every index is selected by all; 61 is not a multiple of the 3 workers."""
    selector = sc.select.topk(density=1.0)
    allreduce = DYNAMIC if name not in NAMES else ALLREDUCES[NAMES[name]][0]
    acc = helpers.hard_accumulators(3, 61)["normal"]
    out = helpers.run_once(selector, allreduce, acc)
    np.testing.assert_allclose(out["total"][0], acc.sum(axis=0), rtol=2e-6, atol=1e-6)
    assert not np.asarray(out["kept"]).any()


@pytest.mark.slow
def test_more_workers_than_indices():
    """Some regions are empty."""
    allreduce = ALLREDUCES["ssar_split_allgather, room for all"][0]
    acc = helpers.hard_accumulators(8, 16)["normal"][:, :5]
    out = helpers.run_once(sc.select.topk(density=0.5), allreduce, acc)
    np.testing.assert_allclose(out["total"][0], exact_total(out["sent"]), atol=1e-6)


# Words and messages.


def collectives(allreduce, workers, size=1000, capacity=30, **options):
    traffic = sc.traffic.of_allreduce(
        allreduce, size=size, capacity=capacity, axis_size=workers, **options
    )
    return [(row.kind, row.words) for row in traffic.collectives if row.weight]


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_recursive_doubling_has_log2_p_messages_that_double(workers):
    """At most k (P-1) pairs, the upper bound of section 5.3.1."""
    got = collectives(sc.allreduce.ssar_recursive_double(), workers)
    stages = workers.bit_length() - 1
    assert got == [("collective_permute", 2.0 * min(30 * 2**t, 1000)) for t in range(stages)]
    assert sum(words for _, words in got) <= 2 * 30 * (workers - 1)


@pytest.mark.parametrize(("workers", "rounds"), [(3, 1), (5, 2), (6, 2), (7, 2)])
def test_surplus_workers_take_two_more_messages(workers, rounds):
    got = collectives(sc.allreduce.ssar_recursive_double(), workers)
    members = 2**rounds
    surplus = workers - members
    assert len(got) == rounds + 2
    # Means over the workers, of which some receive nothing.
    assert got[0][1] == pytest.approx(2 * 30 * surplus / workers)
    assert got[-1][1] == pytest.approx(2 * 30 * workers * surplus / workers)


def test_a_bound_keeps_the_messages_of_recursive_doubling_short():
    got = collectives(sc.allreduce.ssar_recursive_double(capacity=50), 16)
    assert [words for _, words in got] == [60, 100, 100, 100]


@pytest.mark.parametrize("workers", [2, 3, 5, *helpers.slow(8)])
def test_the_ring_has_p_minus_one_messages_that_grow(workers):
    got = collectives(sc.allreduce.ring_sparse(slack=math.inf, fill=math.inf), workers)
    width = math.ceil(1000 / workers)
    # Pairs, or the dense region where these would be longer.
    steps = [("collective_permute", min(60.0 * (t + 1), width)) for t in range(workers - 1)]
    gather = ("all_gather", min(60.0 * workers, width) * (workers - 1))
    assert got == [*steps, gather]
    bounded = collectives(sc.allreduce.ring_sparse(), workers)
    words = [words for _, words in bounded[:-1]]
    assert words == sorted(words)
    union = oracle.expected_union(1000, 30, workers)
    assert bounded[-1][1] == min(2 * math.ceil(1.25 * union / workers), width) * (workers - 1)


@pytest.mark.parametrize("workers", [2, 3, 8, 64])
def test_split_and_allgather_are_two_collectives_of_the_expected_words(workers):
    got = collectives(sc.allreduce.ssar_split_allgather(), workers)
    block = math.ceil(1.25 * 30 / workers)
    union = oracle.expected_union(1000, 30, workers)
    slots = min(math.ceil(1.25 * union / workers), block * workers, math.ceil(1000 / workers))
    assert got == [
        ("all_to_all", _volumes.all_to_all(2 * block * workers, workers)),
        ("all_gather", _volumes.all_gather(min(2 * slots, math.ceil(1000 / workers)), workers)),
    ]
    overlapping = collectives(sc.allreduce.ssar_split_allgather(fill=1.0), workers)
    assert overlapping[1][1] == _volumes.all_gather(2 * block, workers)


# The switch from pairs to dense regions.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dense"), [("normal", True), ("same on all", False), ("one worker", False)]
)
def test_dense_regions_are_sent_where_the_union_passes_delta(case, dense):
    workers, size = 4, 400
    acc = helpers.hard_accumulators(workers, size)[case]
    out = helpers.run_once(WIDE, DYNAMIC, acc)
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
        DYNAMIC, size=size, capacity=80, axis_size=workers, frequencies={"form": one_hot}
    )
    assert float(out["info"].words[0]) == traffic.words


def test_a_union_that_can_not_pass_delta_needs_no_dense_form():
    got = collectives(sc.allreduce.dsar_split_allgather(sparse_sizes=1), 4, capacity=40)
    # 4 blocks of 13 slots; a dense region has 250 words.
    assert got[-1] == ("all_gather", 2 * 4 * 13 * 3)


def test_the_switch_is_where_both_messages_have_the_same_words():
    """With 16-bit values a dense region is half as long, and delta half as large."""
    for dtype, slots in ((jnp.float32, 125), (jnp.bfloat16, 62)):
        shapes = jax.ShapeDtypeStruct((400,), dtype), jax.ShapeDtypeStruct((400,), jnp.int32)
        allreduce = sc.allreduce.dsar_split_allgather(slack=math.inf, sparse_sizes=1)

        def step(values, indices, count, allreduce=allreduce):
            state = sc.allreduce.StepState(count)
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


STREAMS = {
    "ssar_recursive_double": sc.allreduce.ssar_recursive_double,
    "ssar_split_allgather": sc.allreduce.ssar_split_allgather,
    "ring_sparse": sc.allreduce.ring_sparse,
}


@pytest.mark.parametrize("codec", [sc.wire.raw, *helpers.slow(sc.wire.narrow16)])
@pytest.mark.parametrize("workers", [4, 6])
@pytest.mark.parametrize("name", STREAMS)
def test_no_message_is_longer_than_a_dense_one(name, workers, codec):
    """Section 5.1: past delta a stream is dense, and a sum of it stays so."""
    codec = codec()
    whole = codec.encode_dense(jnp.zeros(1000), jnp.uint32(0))[0].size
    region = codec.encode_dense(jnp.zeros(math.ceil(1000 / workers)), jnp.uint32(0))[0].size
    # Beside `all_gather` and `all_to_all`, whose messages are of regions.
    most = {"collective_permute": whole if name == "ssar_recursive_double" else region}
    for capacity in (30, 300, 1000):
        got = collectives(STREAMS[name](codec=codec), workers, capacity=capacity)
        for kind, words in got:
            assert words <= most.get(kind, region * (workers - 1)), capacity
        # All of them are, where the selection is dense itself.
        if capacity == 1000 and workers == 4:
            assert all(w == most.get(kind, region * (workers - 1)) for kind, w in got)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "density"), [(7, 0.15), (4, 0.15), (3, 0.7)])
@pytest.mark.parametrize("name", STREAMS)
def test_sums_of_dense_streams(name, workers, density):
    """The switch is after some rounds, or before the first; the program has the words."""
    allreduce = STREAMS[name]()
    for case in ("normal", "one region", "cancelling"):
        acc = helpers.hard_accumulators(workers, 203)[case]
        out = helpers.run_once(sc.select.topk(density=density), allreduce, acc)
        assert conserved(out), case
    has_words_of_program(out, allreduce, 203, round(203 * density))
    # In the end there is room for everything.
    if density > 0.5:
        assert not np.asarray(out["kept"]).any()
        np.testing.assert_allclose(out["total"][0], exact_total(out["sent"]), atol=1e-5)


# Fill-in.


@pytest.mark.slow
def test_the_union_of_random_indices_has_the_expected_size():
    """Appendix B.1: n (1 - (1 - k/n)^P), which is the sum that the paper gives."""
    workers = 8
    allreduce = ALLREDUCES["ssar_recursive_double"][0]
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(40):
        acc = rng.standard_normal((workers, SIZE)).astype(np.float32)
        sizes.append(int(helpers.run_once(SELECTOR, allreduce, acc)["info"].delivered[0]))
    expected = oracle.expected_union(SIZE, K, workers)
    assert expected == pytest.approx(SIZE * (1 - (1 - K / SIZE) ** workers))
    # Four standard errors.
    assert abs(np.mean(sizes) - expected) < 4 * np.std(sizes) / math.sqrt(len(sizes))


@pytest.mark.parametrize("workers", [2, 5, 64])
def test_slots_of_the_union_follow_the_fill(workers):
    regions = _slots.make_regions(10_000, workers)
    for k in (10, 500, 10_000):

        def slots(fill, k=k, sources=workers):
            return _slots.union_slots(k, regions, sources, 1.0, fill)

        expected = 10_000 * (1 - (1 - k / 10_000) ** workers) / workers
        block = _slots.block_slots(k, regions, 1.0)
        assert slots(None) == pytest.approx(min(expected, workers * block, regions.width), abs=1)
        assert slots(1.0) == pytest.approx(k / workers, abs=1)
        assert slots(math.inf) == min(workers * block, regions.width)
        assert [slots(None, sources=m) for m in range(1, workers)] == sorted(
            slots(None, sources=m) for m in range(1, workers)
        )


# What finds no slot.

CROWDED = {
    "ssar_recursive_double": sc.allreduce.ssar_recursive_double(capacity=25),
    "ssar_split_allgather": sc.allreduce.ssar_split_allgather(slack=1.0, fill=1.0),
    "dsar_split_allgather": sc.allreduce.dsar_split_allgather(slack=1.0),
    "ring_sparse": sc.allreduce.ring_sparse(slack=1.0, fill=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CROWDED)
def test_what_finds_no_slot_is_kept_once_and_not_for_ever(name):
    workers, size = 5, 200
    allreduce = CROWDED[name]
    acc = np.zeros((workers, size), np.float32)
    acc[:, :30] = 1 + np.arange(30) / 100 + np.arange(workers)[:, None]
    state = allreduce.init(size, workers)
    delivered = np.zeros(size, bool)
    # Blocks have 6 slots for the 30 entries; later sums are of the same entries everywhere.
    for _ in range(windows.steps_for_all(6, 30)):
        out = helpers.run_once(CROWDING, allreduce, acc, state)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        assert conserved(out)
        assert np.asarray(out["info"].overflow).sum() > 0
        delivered |= np.asarray(out["total"])[0] != 0
    assert delivered[:30].all()
    for case, acc in helpers.hard_accumulators(workers, size, seed=1).items():
        out = helpers.run_once(CROWDING, allreduce, acc)
        assert conserved(out), case
    has_words_of_program(out, allreduce, size, 30, "dsar" in name)


@pytest.mark.parametrize("turn", range(7))
@pytest.mark.parametrize("count", [0, 3, 5, 8, 11])
def test_bounded_splits_into_what_fits_and_what_is_left(count, turn):
    indices = np.full(11, 99, np.int32)
    indices[:count] = 3 * np.arange(count)
    coo = sc.PaddedCOO(jnp.asarray(indices, jnp.float32), jnp.asarray(indices), 99)
    kept, left = _merge.bounded(coo, 5, jnp.int32(turn))
    assert (kept.capacity, left.capacity) == (5, 6)
    used = np.asarray(kept.indices)[: min(count, 5)]
    assert (np.diff(used) > 0).all()
    both = np.concatenate([used, np.asarray(left.indices)[np.asarray(left.indices) < 99]])
    assert sorted(both) == indices[:count].tolist()


def test_reduce_blocks_adds_rows_one_after_the_other():
    """No scatter has an index twice, whose order would be open on a GPU."""
    values = jnp.asarray([[1e8, 1.0], [-1e8, 0.0], [1.0, 2.0]], jnp.float32)
    indices = jnp.asarray([[4, 9], [4, 10], [4, 9]], jnp.int32)
    total = _merge.reduce_blocks([sc.PaddedCOO(values, indices, 10)], 10, jnp.float32)
    assert total.values.tolist() == [1.0, 3.0, 0, 0, 0, 0]
    assert total.indices.tolist() == [4, 9, 10, 10, 10, 10]


# A codec that rounds, and that drops entries.


def rounding(step=2.0**-8):
    """Values as multiples of ``step``; every seventh entry is not sent."""
    raw = sc.wire.raw()

    def encode(coo, seed):
        slot = jax.lax.broadcasted_iota(jnp.uint32, coo.indices.shape, coo.indices.ndim - 1)
        sent = (coo.indices < coo.size) & ((slot + seed) % 7 != 6)
        values = jnp.where(sent, jnp.round(coo.values / step) * step, 0)
        error = jnp.where(sent, coo.values - values, 0)
        padded = sc.PaddedCOO(values, jnp.where(sent, coo.indices, coo.size), coo.size)
        return sc.Encoded(raw.encode(padded, seed).message, sent, error)

    def encode_dense(values, seed):
        rounded = jnp.round(values / step) * step
        return raw.encode_dense(rounded, seed)[0], values - rounded

    return sc.Codec(encode, raw.decode, encode_dense, raw.decode_dense, exact=False)


LOSSY = rounding()
LOSSY_CASES = {
    "ssar_recursive_double": (sc.allreduce.ssar_recursive_double(capacity=50, codec=LOSSY), 6),
    "ssar_split_allgather": (sc.allreduce.ssar_split_allgather(codec=LOSSY), 3),
    "dsar_split_allgather": (sc.allreduce.dsar_split_allgather(codec=LOSSY), 4),
    "dsar_split_allgather, dense only": (
        sc.allreduce.dsar_split_allgather(slack=math.inf, dense_codec=LOSSY),
        4,
    ),
    "ring_sparse": (sc.allreduce.ring_sparse(codec=LOSSY), 3),
    # Of 40 of 200 entries of 7 workers the sums go dense on the way.
    **{f"{name}, dense": (make(codec=LOSSY), 7) for name, make in STREAMS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY_CASES)
def test_what_a_codec_loses_is_kept(name):
    allreduce, workers = LOSSY_CASES[name]
    state = allreduce.init(200, workers)
    for case in ("normal", "same on all", "one region", "disjoint"):
        acc = helpers.hard_accumulators(workers, 200)[case]
        out = helpers.run_once(WIDE, allreduce, acc, state)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        assert conserved(out), case
        total = np.asarray(out["total"])[0]
        if case == "normal":
            assert np.abs(total).max() > 1
            assert np.asarray(out["kept"]).any()
            np.testing.assert_array_equal(total * 2**8, np.round(total * 2**8))


# Mapped functions.


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
def test_runs_under_shard_map_and_replicates_its_result(check_vma):
    """Six devices: recursive doubling folds."""
    workers, size, capacity = 6, 300, 15
    names = [*NAMES.values(), "dsar_split_allgather"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:workers]), ("w",))
    rng = np.random.default_rng(0)
    indices = np.sort(
        np.stack([rng.choice(size, capacity, replace=False) for _ in range(workers)])
    ).astype(np.int32)
    values = rng.standard_normal((workers, capacity)).astype(np.float32)

    def step(values, indices, state):
        coo = sc.PaddedCOO(values[0], indices[0], size)
        outs = []
        for name in names:
            total, undelivered, new, info = ALLREDUCES[name][0].reduce(coo, state, axis="w")
            total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
            kept = helpers.sum_of_parts(helpers.as_coo(coo, undelivered))[None]
            outs.append((total, kept, new, (info.delivered, info.threshold, info.words)))
        return outs

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(spec("w"), spec("w"), spec()),
        out_specs=[(spec(), spec("w"), spec(), spec())] * len(names),
        check_vma=check_vma,
    )
    state = sc.allreduce.StepState(jnp.int32(0))
    traced = jax.jit(mapped).trace(values, indices, state)
    sent = np.zeros((workers, size), np.float32)
    np.put_along_axis(sent, indices, values, axis=1)
    words = 0.0
    for total, kept, new, info in traced.lower().compile()(values, indices, state):
        expected = exact_total(sent) - exact_total(kept)
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
        replicas = [np.asarray(shard.data) for shard in total.addressable_shards]
        assert all((replica == replicas[0]).all() for replica in replicas)
        assert int(new.count) == 1
        words += float(info[2])
    # What recursive doubling adds for the types is in it. Only the dynamic form may vary.
    most = sc.traffic.of_traced(traced).words
    least = sc.traffic.of_traced(traced, conditional="best").words
    assert least <= words <= most


def test_one_worker_is_replicated_under_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("w",))
    spec = jax.sharding.PartitionSpec

    def step(values, indices):
        coo = sc.PaddedCOO(values[0], indices[0], 9)
        allreduce = sc.allreduce.ssar_recursive_double()
        total, _, _, info = allreduce.reduce(coo, allreduce.init(9, 1), axis="w")
        return total.to_dense(), info.words

    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec("w"), out_specs=spec(), check_vma=True)
    total, words = jax.jit(mapped)(jnp.ones((1, 2)), jnp.asarray([[3, 5]], jnp.int32))
    assert np.flatnonzero(total).tolist() == [3, 5]
    assert words == 0


# Bad input.


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("ssar_recursive_double", {"capacity": 0}, "capacity must be an integer of at least 1"),
        ("ssar_split_allgather", {"slack": 0.5}, "slack must be a number"),
        ("ssar_split_allgather", {"fill": 0.5}, "fill must be a number"),
        ("dsar_split_allgather", {"slack": None}, "slack must be a number"),
        ("dsar_split_allgather", {"sparse_sizes": 0}, "sparse_sizes must be an integer"),
        ("ring_sparse", {"fill": "all"}, "fill must be a number"),
    ],
)
def test_bad_arguments_are_named(factory, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(sc.allreduce, factory)(**options)
