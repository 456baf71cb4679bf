"""What every allreduce must hold, over a table: a new one adds a row."""

import contextlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests import jax_internals
from tests.sparse_collectives import helpers, nodes

DENSITY = 0.05
SIZE = 403
STEPS = 4

# name: (factory of the allreduce, whether every selected entry is delivered).
ALLREDUCES = {
    "agreed": (sc.allreduce.agreed(), False),
    "agreed, few bits": (sc.allreduce.agreed(density=DENSITY, bits="few"), False),
    "leader": (sc.allreduce.leader(), False),
    "complete ok_topk": (sc.allreduce.complete(sc.allreduce.ok_topk(density=DENSITY)), False),
    "complete spardl": (sc.allreduce.complete(sc.allreduce.spardl(density=DENSITY)), False),
    "complete ring_sparse": (
        sc.allreduce.complete(sc.allreduce.ring_sparse(slack=math.inf, fill=math.inf)),
        True,
    ),
    "dense": (sc.allreduce.dense(), True),
    "ok_topk": (sc.allreduce.ok_topk(density=DENSITY), False),
    "ok_topk rotation, 2 messages in flight": (
        sc.allreduce.ok_topk(density=DENSITY, schedule="rotation", messages_in_flight=2),
        False,
    ),
    "ok_topk all_to_all": (
        sc.allreduce.ok_topk(density=DENSITY, schedule="all_to_all"),
        False,
    ),
    "ok_topk, reused global threshold": (
        sc.allreduce.ok_topk(density=DENSITY, global_period=3),
        False,
    ),
    "ok_topk, balanced regions": (
        sc.allreduce.ok_topk(density=DENSITY, regions="balanced", repartition_period=2),
        False,
    ),
    "ok_topk, equal regions": (sc.allreduce.ok_topk(density=DENSITY, regions="equal"), False),
    "ok_topk, messages of several sizes": (sc.allreduce.ok_topk(density=DENSITY, sizes=3), False),
    "ok_topk, no slack": (sc.allreduce.ok_topk(density=DENSITY, slack=1.0), False),
    "ok_topk, as published": (sc.allreduce.ok_topk(density=DENSITY, paper=True), False),
    "ssar_recursive_double": (sc.allreduce.ssar_recursive_double(), True),
    "ssar_split_allgather": (sc.allreduce.ssar_split_allgather(), False),
    "ssar_split_allgather, room for all": (
        sc.allreduce.ssar_split_allgather(slack=math.inf, fill=math.inf),
        True,
    ),
    "dsar_split_allgather": (sc.allreduce.dsar_split_allgather(), False),
    "ring_sparse": (sc.allreduce.ring_sparse(slack=math.inf, fill=math.inf), True),
    "dense_bucketed": (sc.allreduce.dense_bucketed(buckets=3), True),
    "topk_a": (sc.allreduce.topk_a(), True),
    "topk_a, lossy": (sc.allreduce.topk_a(codec=helpers.lossy_codec()), False),
    "sparse_allgather": (sc.allreduce.sparse_allgather(), False),
    "gtopk": (sc.allreduce.gtopk(density=DENSITY), False),
    "spardl": (sc.allreduce.spardl(density=DENSITY), False),
    "spardl, lossy": (sc.allreduce.spardl(density=DENSITY, codec=helpers.lossy_codec()), False),
    "gtopk, lossy": (sc.allreduce.gtopk(density=DENSITY, codec=helpers.lossy_codec()), False),
    # `dense` for one worker, `topk_a` for two to four of them, and `spardl` for more.
    "auto, which may be spardl": (
        sc.planner.auto(density=DENSITY, latency="1ms", bandwidth="1Mbit"),
        False,
    ),
    "auto, ok_topk": (
        sc.planner.auto(density=DENSITY, latency=0.0, bandwidth="1kbit", candidates=["ok_topk"]),
        False,
    ),
}
# Those over two mesh axes, with every way to make nodes of the workers.
OVER_NODES = {
    "hierarchical topk_a": (sc.allreduce.topk_a(), True),
    "hierarchical ok_topk": (sc.allreduce.ok_topk(density=DENSITY), False),
    "hierarchical ok_topk, as published": (
        sc.allreduce.ok_topk(density=DENSITY, paper=True),
        False,
    ),
    "hierarchical agreed, few bits": (
        sc.allreduce.agreed(density=DENSITY, bits="few"),
        False,
    ),
    "hierarchical auto": (
        sc.planner.auto(density=DENSITY, latency="1us", bandwidth="1Gbit"),
        True,
    ),
}
OVER_NODES = {
    name: (sc.allreduce.hierarchical(inner_axis="device", outer=outer), delivers_all)
    for name, (outer, delivers_all) in OVER_NODES.items()
} | {"torus_2d": (sc.allreduce.torus_2d(), True)}
# Those whose workers may keep rounding errors, or sums of what others sent.
KEEPS_OTHER_VALUES = {
    name
    for name in ALLREDUCES | OVER_NODES
    if any(word in name for word in ("lossy", "gtopk", "spardl", "bits"))
}
SELECTOR = sc.select.topk(density=DENSITY)


# Each with more numbers of workers, in 16 bits of both kinds; the others are variants of them.
ALGORITHMS = (
    "agreed",
    "agreed, few bits",
    "auto, which may be spardl",
    "dense",
    "ok_topk",
    "ok_topk, as published",
    "topk_a",
    "sparse_allgather",
    "gtopk",
    "spardl",
    "ssar_recursive_double",
    "ssar_split_allgather",
    "dsar_split_allgather",
    "ring_sparse",
)

# Every algorithm with every codec.
CODECS = {
    "bf16": sc.wire.bf16(),
    "narrow16": sc.wire.narrow16(),
    "narrow8": sc.wire.narrow8(),
    "qsgd": sc.wire.qsgd(),
}
ENCODED = {
    "ok_topk": lambda codec: sc.allreduce.ok_topk(density=DENSITY, codec=codec),
    "topk_a": lambda codec: sc.allreduce.topk_a(codec=codec),
    "sparse_allgather": lambda codec: sc.allreduce.sparse_allgather(codec=codec),
    "gtopk": lambda codec: sc.allreduce.gtopk(density=DENSITY, codec=codec),
    "ssar_recursive_double": lambda codec: sc.allreduce.ssar_recursive_double(codec=codec),
    "ssar_split_allgather": lambda codec: sc.allreduce.ssar_split_allgather(codec=codec),
    "dsar_split_allgather": lambda codec: sc.allreduce.dsar_split_allgather(
        codec=codec, dense_codec=codec
    ),
    "ring_sparse": lambda codec: sc.allreduce.ring_sparse(codec=codec),
    "spardl": lambda codec: sc.allreduce.spardl(density=DENSITY, codec=codec),
}
WITH_CODECS = {
    f"{name}, {codec}": (make(CODECS[codec]), False)
    for name, make in ENCODED.items()
    for codec in CODECS
}


ROWS = ALLREDUCES | WITH_CODECS | OVER_NODES


def run_once(name, acc, state=None, shape=None):
    """A step of the row, and in it the state for the next one; nodes of two, if not told."""
    allreduce, workers = ROWS[name][0], len(acc)
    if name in OVER_NODES:
        shape = shape or (workers // math.gcd(workers, 2), math.gcd(workers, 2))
        return nodes.run_once(SELECTOR, allreduce, acc, shape, state)
    out = helpers.run_once(SELECTOR, allreduce, acc, state)
    out["allreduce_state"] = jax.tree.map(lambda x: x[0], out["allreduce_state"])
    return out


def places(name):
    """Numbers of workers, or the shapes of their nodes: powers of two and others."""
    if name in OVER_NODES:
        return (1, 3), (3, 1), (2, 3), (4, 2)
    if name in WITH_CODECS:
        # One more for one codec of each; of Ok-Topk test_ok_topk_lossy.py has the others.
        third = (3,) if list(WITH_CODECS).index(name) % 5 == 1 else ()
        return (*third, 7) if name.startswith("ok_topk") else (*third, 4, 7)
    return (2, 5, 7, 8) if name in ALGORITHMS and name != "ok_topk" else (3, 8)


def cases(names, quick):
    """Each row with its numbers of workers; compiling them takes minutes, so most are slow."""
    for name in names:
        for place in helpers.WORKERS if name == "ok_topk" else places(name):
            of_nodes = isinstance(place, tuple)
            yield pytest.param(
                (name, *((math.prod(place), place) if of_nodes else (place, None))),
                marks=() if place in quick.get(name, ()) else pytest.mark.slow,
                id=f"{name}-{place[0]}x{place[1]}" if of_nodes else f"{name}-{place}",
            )


# Ok-Topk, and what compiles fast.
QUICK = {
    "ok_topk": (3,),
    "topk_a": (2, 7),
    "topk_a, lossy": (3,),
    "sparse_allgather": (5,),
    "sparse_allgather, qsgd": (3,),
    "dense_bucketed": (3,),
    "agreed, few bits": (7,),
    "hierarchical topk_a": ((2, 3),),
    "torus_2d": ((2, 3),),
}
# One step of one kind of gradients is less than all of them.
QUICK_STEPS = QUICK | {
    "ok_topk": (),
    "topk_a": (2, 5, 7),
    "sparse_allgather": (2, 5),
    "ssar_recursive_double": (2,),
    "ssar_split_allgather, room for all": (3,),
}
# What they may keep of the total of another one, or of an encoding, has tests of its own.
KEEPS_OWN = [name for name in ALLREDUCES | OVER_NODES if name not in KEEPS_OTHER_VALUES]
# First, so that both tests of a case come one after the other.
ROWS = {name: ROWS[name] for name in (*KEEPS_OWN, *ROWS)}

# Rows that compile fast, in each of the tests below.
LIGHT = {"leader", "dense_bucketed", "topk_a", "topk_a, lossy", "sparse_allgather"}
LIGHT |= {"hierarchical topk_a", "torus_2d"}
EACH = list(ALLREDUCES | OVER_NODES)


@pytest.fixture(scope="module")
def case(request):
    return request.param


@pytest.mark.parametrize("case", list(cases(ROWS, QUICK)), indirect=True)
def test_nothing_is_lost_and_all_workers_agree(case):
    row, workers, shape = case
    for name, acc in helpers.hard_accumulators(workers, SIZE).items():
        state = None
        for step in range(STEPS):
            acc = np.roll(acc, 7 * step, axis=1)
            out = run_once(row, acc, state, shape)
            state = out["allreduce_state"]
            where = f"{name}, step {step}"
            total = np.asarray(out["total"])
            np.testing.assert_array_equal(
                total.view(np.int32), np.broadcast_to(total[:1], total.shape).view(np.int32), where
            )
            sent = np.asarray(out["sent"], np.float64)
            kept = np.asarray(out["kept"], np.float64)
            # Some platforms flush sums of subnormals to zero.
            scale = np.abs(sent).sum(axis=0) + 1e-30
            # Sums of up to 8 float32: a few units in the last place of the summands.
            error = np.abs(sent.sum(axis=0) - kept.sum(axis=0) - total[0]) / scale
            assert error.max() < 1e-6, where
            for field in ("delivered", "threshold", "words"):
                values = np.asarray(getattr(out["info"], field))
                assert (values == values[0]).all(), where


@pytest.mark.parametrize("case", list(cases(KEEPS_OWN, QUICK_STEPS)), indirect=True)
def test_what_is_kept_was_sent(case):
    name, workers, shape = case
    acc = helpers.hard_accumulators(workers, SIZE)["normal"]
    out = run_once(name, acc, shape=shape)
    sent, kept = np.asarray(out["sent"]), np.asarray(out["kept"])
    assert ((kept == 0) | (kept == sent)).all()
    if ROWS[name][1]:
        assert (kept == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4, 7, 8])
def test_density_one_with_room_for_all_is_psum(workers):
    allreduces = (
        sc.allreduce.dense(),
        sc.allreduce.dense_bucketed(buckets=2),
        sc.allreduce.topk_a(),
        sc.allreduce.agreed(density=1.0),
        *([sc.allreduce.gtopk(density=1.0)] if workers in (1, 3, 7, 8) else []),
        *([sc.allreduce.spardl(density=1.0)] if workers in (1, 3, 7, 8) else []),
        sc.allreduce.ok_topk(density=1.0, slack=float(workers)),
        sc.allreduce.ok_topk(density=1.0, paper=True, slack=math.inf),
        sc.planner.auto(density=1.0, latency="1us", bandwidth="1Gbit"),
    )
    selector = sc.select.topk(density=1.0)
    acc = helpers.hard_accumulators(workers, 61)["normal"]
    for allreduce in allreduces:
        out = helpers.run_once(selector, allreduce, acc)
        expected = jax.vmap(lambda x: jax.lax.psum(x, "w"), axis_name="w")(jnp.asarray(acc))
        # The order of the sum differs from psum's.
        np.testing.assert_allclose(out["total"], expected, rtol=2e-6, atol=1e-6)
        assert (np.asarray(out["kept"]) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", places("torus_2d"))
def test_density_one_with_room_for_all_is_psum_over_nodes(shape):
    outers = (
        sc.allreduce.topk_a(),
        sc.allreduce.agreed(density=1.0),
        sc.allreduce.ok_topk(density=1.0, slack=float(shape[0])),
    )
    allreduces = [sc.allreduce.hierarchical(inner_axis="device", outer=o) for o in outers]
    acc = helpers.hard_accumulators(math.prod(shape), 61)["normal"]
    for allreduce in (*allreduces, sc.allreduce.torus_2d()):
        out = nodes.run_once(sc.select.topk(density=1.0), allreduce, acc, shape)
        expected = acc.astype(np.float64).sum(axis=0)
        np.testing.assert_allclose(
            out["total"], np.broadcast_to(expected, acc.shape), rtol=2e-6, atol=2e-6
        )
        assert (np.asarray(out["kept"]) == 0).all()


@pytest.mark.parametrize(
    "row",
    helpers.slow_but(
        LIGHT
        | {"complete ring_sparse", "ring_sparse", "ssar_recursive_double", "ssar_split_allgather"}
        | {"dsar_split_allgather", "gtopk", "gtopk, lossy", "spardl, lossy"}
        | {"auto, which may be spardl"},
        EACH,
    ),
)
def test_one_worker_is_plain_selection(row):
    for name, acc in helpers.hard_accumulators(1, SIZE).items():
        if name == "subnormal":
            continue  # not delivered by ok_topk: its own test says so
        out = run_once(row, acc)
        np.testing.assert_array_equal(out["total"], out["sent"])
        assert out["info"].words[0] == 0


@pytest.mark.parametrize(
    "row",
    helpers.slow_but(
        LIGHT
        | {"agreed", "dense", "complete ring_sparse", "auto, which may be spardl"}
        | {"ssar_split_allgather", "ssar_split_allgather, room for all"},
        EACH,
    ),
)
def test_state_keeps_shapes_and_dtypes_and_steps_are_traced_once(row):
    allreduce, workers = ROWS[row][0], 6 if row in OVER_NODES else 3
    acc = helpers.hard_accumulators(workers, SIZE)["normal"]
    if row in OVER_NODES:
        state = nodes.initial(allreduce, SIZE, (3, 2))
        reduce = nodes.simulated_step(SELECTOR, allreduce, (3, 2))
    else:
        state = allreduce.init(SIZE, workers)
        reduce = helpers.simulated_reduce(allreduce, workers)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for i in range(3):
        state = run_once(row, acc * (i + 1), state)["allreduce_state"]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == expected
    before = jax_internals.programs(reduce)
    run_once(row, acc * 9, state)
    assert jax_internals.programs(reduce) == before


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, jnp.bfloat16, marks=() if fast else pytest.mark.slow)
            for name in EACH
            for fast in (name == "sparse_allgather",)
        ),
        *(pytest.param(name, jnp.float16, marks=pytest.mark.slow) for name in ALGORITHMS),
    ],
)
def test_sixteen_bit_values(name, dtype):
    acc = jnp.asarray(helpers.hard_accumulators(4, SIZE)["normal"]).astype(dtype)
    out = run_once(name, acc)
    assert out["total"].dtype == dtype
    total, sent, kept = (np.asarray(out[name], np.float64) for name in ("total", "sent", "kept"))
    # The total is rounded once to the dtype.
    scale = np.abs(sent).sum(axis=0) + 1e-30
    error = np.abs(sent.sum(axis=0) - kept.sum(axis=0) - total[0]) / scale
    assert error.max() <= 4 * float(jnp.finfo(dtype).eps)


def one_hot(branches):
    return [tuple(float(i == branch) for i in range(branches)) for branch in range(branches)]


def ways_of(allreduce, size, workers):
    """The traffic of each way that a step may take; of one way where there is no choice."""
    balances = [{"balance": chosen} for branches in (4, 2) for chosen in one_hot(branches)]
    deliveries = [{"delivery": chosen} for chosen in one_hot(2)]
    given = {"size": size, "capacity": round(DENSITY * size), "axis_size": workers}
    ways = []
    for frequencies in [*balances, *(b | d for b in balances for d in deliveries)]:
        with contextlib.suppress(ValueError):  # Without this choice, or with more branches.
            ways.append(sc.traffic.of_allreduce(allreduce, **given, frequencies=frequencies))
    return ways or [sc.traffic.of_allreduce(allreduce, **given)]


@pytest.mark.parametrize(
    "name",
    helpers.slow_but(
        ("topk_a, lossy",),
        [
            "agreed",
            "agreed, few bits",
            "leader",
            "complete ok_topk",
            "dense",
            "dense_bucketed",
            "ok_topk",
            "ok_topk, reused global threshold",
            "ok_topk, balanced regions",
            "ok_topk, as published",
            "auto, which may be spardl",
            "auto, ok_topk",
            "topk_a",
            "topk_a, lossy",
            "sparse_allgather",
            "gtopk",
            "spardl",
        ],
    ),
)
def test_info_reports_the_words_that_the_program_moves(name):
    allreduce, _ = ALLREDUCES[name]
    workers, size = 8, 10_000
    acc = helpers.hard_accumulators(workers, size)["normal"]
    state = allreduce.init(size, workers)
    possible = set()
    for traffic in ways_of(allreduce, size, workers):
        always = sum(r.words * r.weight for r in traffic.collectives if r.weight == 1)
        periodic = {}
        for r in traffic.collectives:
            if r.weight != 1:
                periodic[r.scope] = periodic.get(r.scope, 0) + r.words
        for share in itertools.product((0, 1), repeat=len(periodic)):
            extra = sum(s * w for s, w in zip(share, periodic.values(), strict=True))
            possible.add(round(always + extra))
    for _ in range(5):
        out = helpers.run_once(SELECTOR, allreduce, acc, state)
        state = jax.tree.map(lambda x: x[0], out["allreduce_state"])
        assert round(float(out["info"].words[0])) in possible
        acc = np.roll(acc, 1, axis=1)


LOWERED_FAST = LIGHT | {"agreed, few bits", "dense", "dsar_split_allgather"}
CUDA_FAST = LOWERED_FAST | {"agreed", "ssar_split_allgather, room for all"}


# (For the CPU the tests above compile all of them.)
@pytest.mark.parametrize(
    ("row", "platform"),
    [
        *((name, "cpu") for name in EACH if name in LOWERED_FAST),
        *(
            pytest.param(name, "cuda", marks=() if name in CUDA_FAST else pytest.mark.slow)
            for name in EACH
        ),
    ],
)
def test_lowers_without_devices(row, platform):
    allreduce = ROWS[row][0]
    axes = {"node": 16, "device": 4} if row in OVER_NODES else {"w": 64}
    size, workers, auto = 1000, 64, (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=auto)

    def step(acc):
        state = allreduce.init(size, workers)
        if row in OVER_NODES:
            return nodes.step_of(SELECTOR, allreduce)(acc, state)
        coo, _, _ = SELECTOR.select(acc, SELECTOR.init(size))
        return allreduce.reduce(coo, state, axis="w")

    whole = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    acc = jax.ShapeDtypeStruct((size,), jnp.float32)
    lowered = jax.jit(mapped).trace(acc).lower(lowering_platforms=(platform,))
    assert "stablehlo" in lowered.as_text()


def test_what_is_the_same_on_all_workers_is_exchanged_under_vmap():
    """Zeros to begin with, say, which vmap does not know to differ."""

    def step(x):
        mine = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
        return sc.transport.all_to_all(mine, "w") + x

    found = sc.simulate(step, axis="w", axis_size=3)(jnp.zeros((3, 1, 1), jnp.int32))
    for worker in range(3):
        row = np.arange(4 * worker, 4 * worker + 4)
        np.testing.assert_array_equal(found[worker], np.stack([row] * 3))
