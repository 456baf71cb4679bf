"""The traffic meter: volumes, groups, scopes, and weights of control flow."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from sparse_collectives import _volumes, traffic

WORKERS = (1, 2, 3, 8, 256)
N = 768  # divisible by each P


def shape(n=N, dtype="float32"):
    return jax.ShapeDtypeStruct((n,), dtype)


def measure(fn, *args, P=4, **kwargs):
    return traffic.of_function(fn, *(args or (shape(),)), axis="w", axis_size=P, **kwargs)


def psum(x):
    return lax.psum(x, "w")


def rotate(x, P=4):
    return lax.ppermute(x, "w", [(i, (i + 1) % P) for i in range(P)])


PSUM = 2 * N * 3 / 4  # of f32[N], P = 4


@pytest.mark.parametrize("P", WORKERS)
@pytest.mark.parametrize(
    ("kind", "collective", "words"),
    [
        ("all_reduce", psum, lambda P: 2 * N * (P - 1) / P),
        ("all_reduce", lambda x: lax.pmax(x, "w"), lambda P: 2 * N * (P - 1) / P),
        ("all_gather", lambda x: lax.all_gather(x, "w"), lambda P: N * (P - 1)),
        (
            "all_to_all",
            lambda x: lax.all_to_all(x, "w", 0, 0, tiled=True),
            lambda P: N * (P - 1) / P,
        ),
        (
            "reduce_scatter",
            lambda x: lax.psum_scatter(x, "w", tiled=True),
            lambda P: N * (P - 1) / P,
        ),
    ],
)
def test_words_of_each_collective(P, kind, collective, words):
    measured = measure(collective, P=P)
    assert measured.words == pytest.approx(words(P))
    for row in measured.collectives:
        assert row.kind == kind
        assert row.group_size == P
        assert row.weight == 1


@pytest.mark.parametrize("P", WORKERS)
def test_words_of_a_permutation(P):
    measured = measure(lambda x: rotate(x, P), P=P)
    assert measured.words == (N if P > 1 else 0)
    assert [row.group_size for row in measured.collectives] == [P]


def test_pairs_of_a_worker_with_itself_move_nothing():
    swap = [(0, 1), (1, 0), (2, 2), (3, 3)]
    assert measure(lambda x: lax.ppermute(x, "w", swap)).words == N / 2


def test_workers_without_a_source_lower_the_mean():
    shift = [(0, 1), (1, 2)]
    measured = measure(lambda x: lax.ppermute(x, "w", shift), P=8)
    assert measured.words == N * 2 / 8
    assert measured.collectives[0].group_size == 8


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float32", N),
        ("bfloat16", N / 2),
        ("int8", N / 4),
        ("uint16", N / 2),
        ("bool", N / 4),
        ("complex64", 2 * N),
        ("float8_e4m3fn", N / 4),
    ],
)
def test_words_follow_the_width_of_the_dtype(dtype, words):
    assert measure(rotate, shape(dtype=dtype)).words == words


def test_all_operands_of_a_collective_count():
    measured = measure(lambda x, y: lax.psum((x, y), "w"), shape(), shape(4, "bfloat16"))
    assert measured.words == PSUM + 2 * 2 * 3 / 4


def test_groups_of_two_axes():
    def fn(x):
        return (
            lax.psum(x, "node"),
            lax.psum(x, "gpu"),
            lax.psum(x, ("node", "gpu")),
            lax.ppermute(x, "gpu", [(0, 1), (1, 0)]),
        )

    measured = traffic.of_function(fn, shape(), axis=("node", "gpu"), axis_size=(4, 2))
    assert [(r.words, r.group_size) for r in measured.collectives] == [
        (2 * N * 3 / 4, 4),
        (2 * N * 1 / 2, 2),
        (2 * N * 7 / 8, 8),
        (N, 8),
    ]


def test_groups_within_an_axis():
    measured = measure(lambda x: lax.all_gather(x, "w", axis_index_groups=[[0, 1], [2, 3]]))
    assert measured.words == N
    assert measured.collectives[0].group_size == 2


def test_specs_make_the_arguments_global():
    spec = jax.sharding.PartitionSpec("w")
    assert measure(rotate, in_specs=spec, out_specs=spec).words == N / 4


def test_arguments_may_be_arrays():
    assert measure(psum, jnp.zeros(N)).words == PSUM


def test_a_thousand_workers_and_many_permutations():
    P = 1024

    def fn(x):
        for shift in range(1, 20):
            x = lax.ppermute(x, "w", [(i, (i + shift) % P) for i in range(P)])
        return x

    assert measure(fn, P=P).words == 19 * N


def test_program_without_collectives():
    assert measure(lambda x: x + 1) == traffic.Traffic(0.0, ())


# Conditionals.


def one_branch_of_two(x):
    return lax.cond(x[0] > 0, psum, lambda x: x, x)


def three_branches(x):
    return lax.switch(
        jnp.int32(x[0]),
        [lambda x: x, rotate, lambda x: lax.all_gather(x, "w").sum(0)],
        x,
    )


def test_conditional_worst_and_best():
    assert measure(one_branch_of_two).words == PSUM
    assert measure(one_branch_of_two, conditional="best").words == 0
    assert measure(three_branches).words == 3 * N
    assert measure(three_branches, conditional="best").words == 0


@pytest.mark.parametrize("heavy_branch", [True, False])
def test_periodic_scope_weighs_the_heavier_branch(heavy_branch):
    def fn(x):
        with jax.named_scope("again.every64"):
            return lax.cond((x[0] > 0) == heavy_branch, psum, rotate, x)

    measured = measure(fn)
    assert measured.words == pytest.approx(PSUM / 64 + N * 63 / 64)
    assert measured == measure(fn, conditional="best")
    assert measured.by_scope() == {"again.every64": measured.words}


def test_periodic_scope_does_not_reach_into_the_branches():
    def fn(x):
        with jax.named_scope("again.every8"):
            return lax.cond(x[1] > 0, one_branch_of_two, lambda x: x, x)

    assert measure(fn).words == pytest.approx(PSUM / 8)


def test_periodic_scopes_nest():
    def inner(x):
        with jax.named_scope("inner.every4"):
            return one_branch_of_two(x)

    def fn(x):
        with jax.named_scope("outer.every8"):
            return lax.cond(x[1] > 0, inner, lambda x: x, x)

    measured = measure(fn)
    assert measured.words == pytest.approx(PSUM / 32)
    assert measured.collectives[0].scope == "outer.every8/inner.every4"


def in_scope(fn, name):
    def scoped(x):
        with jax.named_scope("algorithm"), jax.named_scope(name):
            return fn(x)

    return scoped


@pytest.mark.parametrize("name", ["balance", "algorithm", "algorithm/balance"])
def test_frequencies_weigh_by_branch_index(name):
    fn = in_scope(three_branches, "balance")
    measured = measure(fn, frequencies={name: (0.5, 0.25, 0.25)})
    assert measured.words == 0.25 * N + 0.25 * 3 * N
    assert [row.weight for row in measured.collectives] == [0.25, 0.25]
    only_neighbours = measure(fn, frequencies={name: (0, 1, 0)})
    assert only_neighbours.words == N
    assert len(only_neighbours.collectives) == 1


def test_first_weight_of_a_cond_is_that_of_false():
    fn = in_scope(one_branch_of_two, "balance")
    assert measure(fn, frequencies={"balance": (1, 0)}).words == 0
    assert measure(fn, frequencies={"balance": (0, 1)}).words == PSUM


def test_innermost_name_counts():
    fn = in_scope(three_branches, "balance")
    frequencies = {"algorithm": (1, 0, 0), "balance": (0, 1, 0)}
    with pytest.raises(ValueError, match="algorithm"):
        measure(fn, frequencies=frequencies)

    def both(x):
        with jax.named_scope("algorithm"):
            x = three_branches(x)
        return fn(x)

    assert measure(both, frequencies=frequencies).words == N


def test_frequencies_overrule_the_period():
    fn = in_scope(one_branch_of_two, "again.every64")
    assert measure(fn, frequencies={"again.every64": (0.5, 0.5)}).words == PSUM / 2


@pytest.mark.parametrize(
    ("frequencies", "message"),
    [
        ({"balance": (0.5, 0.5)}, "3 branches"),
        ({"balance": (0.5, 0.5, 0.5)}, "sums to 1.5"),
        ({"balance": (1.5, -0.5, 0)}, ">= 0"),
        ({"balanced": (1, 0, 0)}, r"balanced.*algorithm/balance \(3 branches\)"),
        ({"balance": 3}, "loop"),
        ({"bal": (1, 0, 0)}, "bal"),
    ],
)
def test_bad_frequencies(frequencies, message):
    with pytest.raises(ValueError, match=message):
        measure(in_scope(three_branches, "balance"), frequencies=frequencies)


def test_bad_conditional():
    with pytest.raises(ValueError, match="'worst' or 'best'"):
        measure(psum, conditional="average")


def test_axes_and_sizes_must_match():
    with pytest.raises(ValueError, match="one size per name"):
        traffic.of_function(psum, shape(), axis=("w", "v"), axis_size=4)
    with pytest.raises(ValueError, match="sizes >= 1"):
        traffic.of_function(psum, shape(), axis="w", axis_size=0)


# Loops.


@pytest.mark.parametrize("bounds", [(0, 5), (2, 7), (jnp.int32(0), jnp.int32(5))])
def test_fori_loop_counts_each_iteration(bounds):
    measured = measure(lambda x: lax.fori_loop(*bounds, lambda i, x: psum(x), x))
    assert measured.words == pytest.approx(5 * PSUM)


def test_while_loop_that_counts():
    def fn(x):
        return lax.while_loop(lambda c: c[0] <= 10, lambda c: (c[0] + 3, psum(c[1])), (1, x))

    assert measure(fn).words == 4 * PSUM


def test_scan_and_conditionals_nest():
    def body(x, _):
        with jax.named_scope("maybe"):
            x = one_branch_of_two(x)
            return lax.fori_loop(0, 2, lambda i, x: three_branches(x), x), None

    def fn(x):
        return lax.scan(body, x, None, length=3)[0]

    assert measure(fn).words == pytest.approx(3 * (PSUM + 2 * 3 * N))
    assert measure(fn, conditional="best").words == 0
    scopes = {row.scope for row in measure(fn).collectives}
    assert scopes == {"maybe"}


def unknown_trips(x):
    with jax.named_scope("search"):
        return lax.while_loop(lambda x: x[0] > psum(x)[0], psum, x)


def test_loop_of_unknown_length_needs_a_number():
    with pytest.raises(ValueError, match=r"frequencies=\{'search': iterations\}"):
        measure(unknown_trips)
    measured = measure(unknown_trips, frequencies={"search": 2.5})
    assert measured.words == pytest.approx(3.5 * PSUM + 2.5 * PSUM)
    with pytest.raises(ValueError, match="named_scope"):
        measure(lambda x: lax.while_loop(lambda x: x[0] > 0, psum, x))


def test_loop_without_collectives_needs_none():
    def fn(x):
        return psum(lax.while_loop(lambda x: x[0] > 0, lambda x: x - 1, x))

    assert measure(fn).words == PSUM


# Scopes and functions.


def test_function_called_from_several_scopes():
    exchange = jax.jit(psum)

    def fn(x):
        with jax.named_scope("a"):
            x = exchange(x)
        with jax.named_scope("b"), jax.named_scope("c"):
            return exchange(exchange(x))

    measured = measure(fn)
    assert measured.by_scope() == {"a": PSUM, "b/c": 2 * PSUM}
    assert measured.by_scope(depth=1) == {"a": PSUM, "b": 2 * PSUM}


def test_conditional_in_a_called_function_sees_the_scopes_of_the_call():
    inner = jax.jit(three_branches)
    fn = in_scope(inner, "balance")
    assert measure(fn, frequencies={"balance": (0, 1, 0)}).words == N


def test_scopes_survive_differentiation():
    def loss(x):
        with jax.named_scope("forward"):
            return lax.ppermute(x * x, "w", [(0, 1), (1, 0)]).sum()

    measured = measure(lambda x: jax.value_and_grad(loss)(x), P=2)
    assert measured.by_scope() == {"forward": 2 * N}


def test_scopes_do_not_need_tracebacks_in_locations():
    def fn(x):
        with jax.named_scope("step"):
            return jax.jit(in_scope(one_branch_of_two, "again.every64"))(x)

    name = "jax_include_full_tracebacks_in_locations"
    expected = measure(fn)
    assert expected.by_scope() == {"step/algorithm/again.every64": PSUM / 64}
    jax.config.update(name, False)
    try:
        assert measure(fn) == expected
    finally:
        jax.config.update(name, True)


def test_of_lowered_reads_a_whole_step():
    mesh = jax.sharding.AbstractMesh((4,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    @jax.jit
    def step(x):
        with jax.named_scope("step"):
            return jax.shard_map(
                in_scope(psum, "reduce"), mesh=mesh, in_specs=spec, out_specs=spec
            )(2 * x)

    lowered = step.trace(shape()).lower(lowering_platforms=("cpu",))
    measured = traffic.of_lowered(lowered)
    assert measured.by_scope() == {"step/algorithm/reduce": PSUM}


def test_of_allreduce_builds_selection_and_state():
    class Allreduce(NamedTuple):
        init: object
        reduce: object

    def init(size, axis_size):
        return jnp.zeros((), "int32") + size * axis_size

    def reduce(coo, state, *, axis):
        assert coo.size == 1000
        gathered = lax.all_gather((coo.values, coo.indices), axis)
        maybe = lax.cond(state > 0, lambda x: lax.psum(x, axis), lambda x: x, state)
        return gathered, coo, maybe, None

    measured = traffic.of_allreduce(
        Allreduce(init, reduce), size=1000, capacity=10, axis_size=8, axis="w"
    )
    assert measured.words == 2 * 10 * 7 + 2 * 7 / 8
    with pytest.raises(ValueError, match="`capacity` is 0"):
        traffic.of_allreduce(Allreduce(init, reduce), size=1000, capacity=0, axis_size=8)


def test_table_lists_equal_collectives_once():
    table = measure(lambda x: rotate(rotate(rotate(x)))).table().splitlines()
    assert len(table) == 3
    assert table[1].split() == [
        '-', 'collective_permute', '4', '3', '768.0', '1', '2,304.0',
    ]  # fmt: skip
    assert table[2].split() == ["total", "2,304.0"]


# The volume model.


@pytest.mark.parametrize(
    "volume",
    [
        _volumes.all_reduce,
        _volumes.all_gather,
        _volumes.all_to_all,
        _volumes.reduce_scatter,
        _volumes.broadcast,
        _volumes.ppermute,
    ],
)
def test_one_worker_receives_nothing(volume):
    received = volume(10, 1)
    assert received == 0
    assert isinstance(received, float)
    with pytest.raises(ValueError, match="`P`"):
        volume(10, 0)
    with pytest.raises(ValueError, match="`words`"):
        volume(-1, 2)


@pytest.mark.parametrize("P", WORKERS)
def test_reduce_scatter_and_allgather_make_an_allreduce(P):
    halves = _volumes.reduce_scatter(N, P) + _volumes.all_gather(N / P, P)
    assert math.isclose(halves, _volumes.all_reduce(N, P))
