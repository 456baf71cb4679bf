"""The cost model predicts the words and messages of the traced programs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives import cost_model, traffic
from sparse_collectives.allreduce._parts import _slots
from sparse_collectives.cost_model import Workload, _formulas
from sparse_collectives.cost_model._costs import log2_rounds
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.test_cost_model import TWO_LEVELS


def traced(name, load, codec, *, check_vma=False):
    """A step of an algorithm for P workers, or m nodes of w, traced without devices."""
    axes, coo_size, capacity, workers = {"w": load.workers}, load.size, load.selected, load.workers
    codec, hierarchical = table.CODECS[codec](), name.startswith("hierarchical")
    if name in TWO_LEVELS:
        axes = {"node": load.workers // load.inner_size, "device": load.inner_size}
    if hierarchical:
        made = table.make(name.rstrip(")").split("(")[1], load.density, codec)
        allreduce = sc.allreduce.hierarchical(inner_axis="device", outer=made)
        coo_size = -(-load.size // load.inner_size)
        capacity, workers = round(load.density * coo_size), axes["node"]
    elif name == "torus_2d":
        made = allreduce = sc.allreduce.published.torus_2d()
    else:
        options = {
            "partitioned_topk(few)": {"bits": None},
            "partitioned_topk(1, 3)": {"bits": (1, 3)},
        }
        options = options.get(name, {})
        made = allreduce = table.make(name.partition("(")[0], load.density, codec, **options)

    def step(values, indices, vector, state):
        if hierarchical:
            vector = allreduce.scatter(vector)
            # Only so that the exchange is not dead code.
            values = values + vector[0]
        coo = sc.PaddedCOO(values[:capacity], indices[:capacity], coo_size)
        axis = tuple(axes) if len(axes) > 1 else "w"
        total, _, _, info = allreduce.reduce(coo, state, axis=axis)
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        return allreduce.gather(total, load.size) if hierarchical else total, info.words

    split, whole = P(tuple(axes)), P()
    mapped = jax.shard_map(
        step,
        mesh=helpers.abstract_mesh(**axes),
        in_specs=(split, split, split, whole),
        out_specs=whole,
        check_vma=check_vma,
    )
    shapes = (
        jax.ShapeDtypeStruct((load.workers * capacity,), jnp.float32),
        jax.ShapeDtypeStruct((load.workers * capacity,), jnp.int32),
        jax.ShapeDtypeStruct((load.workers * load.size,), jnp.float32),
    )
    state = jax.eval_shape(lambda: made.init(coo_size, workers))
    return jax.jit(mapped).trace(*shapes, state)


# (n, k, P): for exact pairs, and for each of the other encodings.
EXACT = [(1000, 100, 2), (999, 5, 6), (20_000, 1000, 5), (64, 64, 3)]
ALSO = {
    "ok_topk": [(4000, 1, 3), (10**5, 9000, 20)],
    "partitioned_topk(few)": [(10**5, 5000, 11), (10**5, 500, 40)],
    "partitioned_topk(1, 3)": [(10**5, 5000, 11), (10**5, 500, 40)],
    "gtopk": [(10**4, 100, 48)],
    "spardl": [(10**4, 100, 48)],
    "ssar_recursive_double": [(10**4, 700, 11)],
    # From a few entries, for which a short form is enough, to more than a dense form holds.
    "dsar_split_allgather": [(10**4, 10, 8), (10**4, 3000, 7)],
}
POINTS = [
    (name, "raw", point)
    for name in cost_model.ALGORITHMS
    for point in (*EXACT, *ALSO.get(name, ()))
]
POINTS += [
    (name, codec, (1999, 100, 3))
    for name, row in cost_model.ALGORITHMS.items()
    for codec in table.LOSSY_CODECS
    if len(row.codecs) > 1 and not row.two_level
]
POINTS += [
    (name, "narrow8", (20_000, 1000, 6))
    for name in ("ok_topk", "gtopk", "dsar_split_allgather", "hierarchical(ok_topk)")
]

# Messages of a collective of P workers, as the model counts them.
MESSAGES = {
    "all_reduce": lambda P: 2 * log2_rounds(P),
    "all_gather": log2_rounds,
    "reduce_scatter": log2_rounds,
    "all_to_all": lambda P: P - 1,
    "collective_permute": lambda P: 1,
    "collective_broadcast": log2_rounds,
}

# With a codec their programs take long to trace.
LONG = ("ok_topk", "hierarchical(ok_topk)", "spardl", "dsar_split_allgather", "ring_sparse")
LONG += ("ssar_recursive_double",)


def traces_for_long(name, codec, point):
    if codec != "raw":
        return name in LONG
    if "ok_topk" in name:
        return point[1] >= 100
    return "spardl" in name and point not in ((1000, 100, 2), (64, 64, 3))


@pytest.mark.parametrize(
    ("name", "codec", "point"),
    [
        pytest.param(
            *each,
            id="-".join(map(str, each)),
            marks=pytest.mark.slow if traces_for_long(*each) else (),
        )
        for each in POINTS
    ],
)
@pytest.mark.one_in(3)
def test_words_and_messages_are_those_of_the_traced_program(name, codec, point):
    n, k, workers = point
    # Two nodes, or as many nodes as workers if their number is odd.
    inner = workers // 2 if name in TWO_LEVELS and workers % 2 == 0 else 1
    load = Workload(n, k, workers, inner)
    estimate = cost_model.predict(name, load, codec)._asdict()
    program = traced(name, load, codec)
    for bound, conditional in (("lower", "best"), ("upper", "worst")):
        measured = traffic.of_traced(program, conditional=conditional)
        outer = measured.words
        if name in TWO_LEVELS:
            scopes = measured.by_scope(2)
            outer = sum(words for scope, words in scopes.items() if scope.endswith("/outer"))
            if "ok_topk" in name:
                # The sum over the node is in the scope of the code that needs it.
                nodes = Workload(-(-n // inner), max(1, round(k / inner)), workers // inner)
                least, _, most = _formulas.ok_topk_flags(nodes)
                told = least if bound == "lower" else most
                outer -= 2 * told * (load.inner_size - 1) / load.inner_size
            inside = measured.words - outer
            assert estimate[bound].inner_words == pytest.approx(inside, rel=1e-9), bound
        if name == "ssar_recursive_double" and bound == "upper":
            continue  # the next test
        assert estimate[bound].words == pytest.approx(outer, rel=1e-9), bound
        # This number of buckets is for larger gradients, and balancing over nodes adds messages.
        if name not in ("dense_bucketed", "hierarchical(ok_topk)"):
            each = (row.weight * MESSAGES[row.kind](row.group_size) for row in measured.collectives)
            messages = estimate[bound].messages + estimate[bound].inner_messages
            assert messages == pytest.approx(sum(each), rel=1e-9), bound


@pytest.mark.parametrize(("n", "k", "workers"), [(1000, 100, 2), (999, 50, 6), (1999, 100, 3)])
def test_recursive_doubling_is_expected_to_be_typed_as_replicated(n, k, workers):
    load = Workload(n, k, workers)
    program = traced("ssar_recursive_double", load, "raw", check_vma=True)
    estimate = cost_model.predict("ssar_recursive_double", load)
    assert estimate.expected.words == pytest.approx(traffic.of_traced(program).words, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "k", "workers", "way"),
    [
        pytest.param(20_000, 1000, 6, {"delivery": (0, 1)}, marks=pytest.mark.slow),
        # Windows of this many workers would be long, so a neighbor takes the surplus.
        (100_000, 10_000, 64, {"balance": (0, 1, 0, 0)}),
    ],
    ids=["windows", "neighbours"],
)
def test_expected_words_of_ok_topk(n, k, workers, way):
    measured = traffic.of_allreduce(
        sc.allreduce.ok_topk(density=k / n), size=n, capacity=k, axis_size=workers, frequencies=way
    )
    expected = cost_model.predict("ok_topk", Workload(n, k, workers)).expected
    assert expected.words == pytest.approx(measured.words, rel=1e-9)


def test_expected_form_of_dsar_is_the_one_that_runs():
    # Uniform selections: the form at run time is the expected one.
    n, k, workers = 20_000, 1000, 6
    rng = np.random.default_rng(0)
    indices = np.stack([np.sort(rng.choice(n, k, replace=False)) for _ in range(workers)])
    allreduce = sc.allreduce.published.dsar_split_allgather(slack=1.25)

    def step(indices):
        coo = sc.PaddedCOO(jnp.ones(k, jnp.float32), indices, n)
        return allreduce.reduce(coo, allreduce.init(n, workers), axis="workers")[3].words

    words = sc.simulate(step, axis_size=workers)(indices.astype(np.int32))
    expected = cost_model.predict("dsar_split_allgather", Workload(n, k, workers)).expected
    np.testing.assert_allclose(words, expected.words, rtol=1e-6)


# Single messages.

N, K = 1000, 30


def messages_of(allreduce, workers, k=K):
    """``(kind, words)`` of each collective that is taken."""
    measured = traffic.of_allreduce(allreduce, size=N, capacity=k, axis_size=workers)
    return [(row.kind, row.words) for row in measured.collectives if row.weight]


def test_options_bound_the_messages():
    bounded = messages_of(table.make("ssar_recursive_double", capacity=50), 16)
    assert [words for _, words in bounded] == [60, 100, 100, 100]
    # Blocks of 13 slots for each of 3 workers, and no more in the union.
    overlapping = messages_of(table.make("ssar_split_allgather", fill=1.0), 3)
    assert overlapping == [("all_to_all", 2 * 13 * 2), ("all_gather", 2 * 13 * 2)]


@pytest.mark.parametrize("codec", [sc.wire.raw, *helpers.slow(sc.wire.narrow16)])
@pytest.mark.parametrize("workers", [4, 6])
@pytest.mark.parametrize("name", ["ssar_recursive_double", "ssar_split_allgather", "ring_sparse"])
@pytest.mark.one_in(3)
def test_no_message_of_sparcml_is_longer_than_a_dense_one(name, workers, codec):
    """Section 5.1: past delta a stream is dense, and a sum of it stays so."""
    codec = codec()
    whole = codec.encode_dense(jnp.zeros(N), jnp.uint32(0))[0].size
    region = codec.encode_dense(jnp.zeros(math.ceil(N / workers)), jnp.uint32(0))[0].size
    # Apart from `all_gather` and `all_to_all`, whose messages are of regions.
    most = {"collective_permute": whole if name == "ssar_recursive_double" else region}
    for k in (30, 300, 1000):
        got = messages_of(table.make(name, codec=codec), workers, k=k)
        for kind, words in got:
            assert words <= most.get(kind, region * (workers - 1)), k
        # All messages are as long as dense ones if the selection is dense.
        if k == 1000 and workers == 4:
            assert all(w == most.get(kind, region * (workers - 1)) for kind, w in got)


@pytest.mark.parametrize("workers", [*range(1, 18), 63, 64, 65, 100, 384, 1000, 1024])
def test_spardl_brings_every_part_of_a_block_to_its_owner_once(workers):
    plan = _slots.make_halving(10**6, 10**4, workers, 10**4)
    # The sender of the part of a worker's own block, by distance; it is the same for all.
    parts = [[0] for _ in range(workers)]
    for step in plan.rounds:
        assert step.blocks <= step.distance < len(parts) <= 2 * step.distance
        going, parts = parts[step.distance :], parts[: step.distance]
        assert len(going) == step.blocks
        for place, sources in enumerate(going):
            parts[place] += [source + step.distance for source in sources]
    assert len(parts) == 1
    assert sorted(parts[0]) == list(range(workers))
