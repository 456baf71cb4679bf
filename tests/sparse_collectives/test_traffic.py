"""The traffic meter: volumes, groups, scopes, and weights of control flow."""

import math
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax

from sparse_collectives import _volumes, traffic

WORKERS = (1, 2, 3, 4, 5, 6, 7, 8, 256)
N = 26_880  # divisible by each P


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
        ("all_reduce", lambda x: lax.pmin(x, "w"), lambda P: 2 * N * (P - 1) / P),
        ("collective_broadcast", lambda x: lax.pbroadcast(x, "w", 0), lambda P: N * (P - 1) / P),
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
        (N, 2),
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


def mapped(fn, check_vma, P=4):
    """`fn` on the P parts of f32[P N], as a traced program."""
    mesh = jax.sharding.AbstractMesh((P,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("w")
    whole = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return jax.jit(whole).trace(shape(P * N))


@pytest.mark.parametrize("P", range(2, 9))
@pytest.mark.parametrize("check_vma", [False, True])
def test_words_do_not_depend_on_the_types_of_what_varies(check_vma, P):
    def fn(x):
        exchanged = [
            psum(x),
            lax.pmax(x, "w"),
            lax.all_gather(x, "w", to="invarying") if check_vma else lax.all_gather(x, "w"),
            lax.all_to_all(x, "w", 0, 0, tiled=True),
            lax.psum_scatter(x, "w", tiled=True),
            rotate(x, P),
        ]
        return x + sum(jnp.sum(y) for y in exchanged)

    measured = traffic.of_traced(mapped(fn, check_vma, P))
    share = (P - 1) / P
    expected = [2 * N * share, 2 * N * share, N * (P - 1), N * share, N * share, N]
    assert [row.words for row in measured.collectives] == pytest.approx(expected)
    assert {row.group_size for row in measured.collectives} == {P}


@pytest.mark.parametrize("P", range(2, 9))
def test_words_under_pmap(P):
    program = jax.pmap(psum, axis_name="w", devices=jax.devices()[:P])
    measured = traffic.of_traced(jax.make_jaxpr(program)(jnp.ones((P, N))))
    assert [row.kind for row in measured.collectives] == ["all_reduce"]
    assert measured.words == pytest.approx(2 * N * (P - 1) / P)


def test_words_of_a_batch_are_those_of_all_its_members():
    def fn(x):
        return jax.vmap(lambda row: lax.psum(row, ("w", "batch")), axis_name="batch")(
            x.reshape(6, -1)
        )

    # Members of the batch are on one worker: their sum is what is exchanged.
    assert measure(fn).words == PSUM / 6
    assert measure(lambda x: jax.vmap(psum)(x.reshape(6, -1))).words == PSUM


def test_words_of_an_axis_within_an_axis():
    """One `shard_map` in another, each over one axis of a mesh of two."""
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((3, 2), ("node", "gpu"), axis_types=types)
    spec = jax.sharding.PartitionSpec()

    def over(fn, name, mesh=None):
        return jax.shard_map(
            fn, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={name}, check_vma=False
        )

    def outer(x):
        return over(lambda x: lax.psum(x, "gpu"), "gpu")(lax.psum(x, "node"))

    measured = traffic.of_traced(jax.jit(over(outer, "node", mesh)).trace(shape()))
    assert [row.group_size for row in measured.collectives] == [3, 2]
    assert measured.words == pytest.approx(2 * N * 2 / 3 + N)


def test_words_of_three_axes():
    sizes = {"a": 2, "b": 3, "c": 4}

    def fn(x):
        return lax.all_gather(x, ("a", "c")), lax.psum(x, ("b", "c")), lax.pmax(x, "b")

    measured = traffic.of_function(fn, shape(), axis=tuple(sizes), axis_size=tuple(sizes.values()))
    assert [row.words for row in measured.collectives] == pytest.approx(
        [N * 7, 2 * N * 11 / 12, 2 * N * 2 / 3]
    )


# Functions of functions.


def relu_of_sum(x):
    return jnp.maximum(psum(x), 0)


def custom_jvp(x):
    fn = jax.custom_jvp(relu_of_sum)
    fn.defjvps(lambda tangent, _, x: tangent)
    return fn(x)


def custom_vjp(x):
    fn = jax.custom_vjp(relu_of_sum)
    fn.defvjp(lambda x: (relu_of_sum(x), None), lambda _, g: (g,))
    return fn(x)


@pytest.mark.parametrize(
    "fn",
    [jax.jit(psum), jax.jit(jax.jit(psum)), jax.checkpoint(psum), custom_jvp, custom_vjp],
    ids=["jit", "jit in jit", "checkpoint", "custom_jvp", "custom_vjp"],
)
def test_a_function_counts_as_often_as_it_is_called(fn):
    measured = measure(lambda x: fn(fn(x)))
    assert [row.words for row in measured.collectives] == [PSUM, PSUM]


def test_what_checkpoint_does_again_counts_again():
    def loss(x):
        def square(x):
            with jax.named_scope("square"):
                return lax.all_gather(jnp.sin(x), "w") ** 2

        return jnp.sum(jax.checkpoint(square)(x))

    once, twice = measure(jax.grad(loss)), measure(jax.value_and_grad(loss))
    assert [row.kind for row in once.collectives] == ["all_gather", "reduce_scatter"]
    assert [row.kind for row in twice.collectives] == ["all_gather"] * 2 + ["reduce_scatter"]
    assert {row.scope for row in twice.collectives} == {"square"}


def test_results_that_nothing_uses_do_not_count():
    def both(x):
        return psum(x), rotate(x)

    def choose(x):
        return lax.cond(x[0] > 0, both, lambda x: (x, x), x)[1]

    assert measure(lambda x: both(x)[1]).words == N
    assert measure(lambda x: jax.jit(both)(x)[0]).words == PSUM
    assert measure(choose).words == N
    assert measure(lambda x: (both(x), x)[1]).words == 0


def bind(primitive_name, x, /, **parameters):
    """A primitive that the meter has never heard of."""
    primitive = jax.extend.core.Primitive(primitive_name)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    return primitive.bind(x, **parameters)


@pytest.mark.parametrize(
    "parameters",
    [{"axis_name": "w"}, {"axis_name": ("w",)}, {"axes": ("w", 0)}, {"axes": frozenset("w")}],
)
def test_an_unknown_collective_is_an_error_that_names_it(parameters):
    with pytest.raises(ValueError, match=r"a pmedian over \['w'\] in scope 'algorithm/s'.*jax"):
        measure(in_scope(lambda x: bind("pmedian", x, **parameters), "s"))


@pytest.mark.parametrize("parameters", [{}, {"axis": 0}, {"axes": (0,)}, {"name": "w"}])
def test_an_unknown_primitive_over_no_axis_is_free(parameters):
    assert measure(lambda x: psum(bind("median", x, **parameters))).words == PSUM


def test_collectives_in_an_unknown_primitive_are_an_error():
    def solve(x):
        return lax.custom_linear_solve(lambda x: 2 * psum(x), x, lambda _, x: psum(x) / 2)

    with pytest.raises(ValueError, match="custom_linear_solve in scope .* with collectives"):
        measure(solve)

    def solve_locally(x):
        diagonal = 2.0 + lax.axis_index("w").astype(x.dtype)
        return lax.custom_linear_solve(lambda x: diagonal * x, x, lambda _, x: x / diagonal)

    assert measure(solve_locally).words == 0


def test_what_has_no_fixed_volume_is_an_error():
    def ragged(x):
        offsets = jnp.zeros(4, jnp.int32)
        return lax.ragged_all_to_all(x, x, *[offsets] * 4, axis_name="w")

    with pytest.raises(ValueError, match="ragged_all_to_all in scope .* depends on data"):
        measure(ragged)
    with pytest.raises(ValueError, match="allreduce_mpi in scope .* over MPI"):
        measure(lambda x: bind("allreduce_mpi", x, comm=1))


def test_an_axis_that_is_not_bound_is_an_error():
    program = jax.make_jaxpr(psum, axis_env=[("w", 4)])(shape())
    with pytest.raises(ValueError, match=r"psum over \['w'\] .* outside of a `shard_map`"):
        traffic.of_traced(program)


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


def test_while_loop_between_bounds_that_it_carries_or_is_given():
    def fn(x):
        def count(start, stop, x):
            return lax.while_loop(
                lambda c: c[0] < c[2], lambda c: (c[0] + 1, psum(c[1]), c[2]), (start, x, stop)
            )[1]

        return jax.jit(count)(2, 7, x)

    assert measure(fn).words == 5 * PSUM


@pytest.mark.parametrize(
    ("test", "step"),
    [
        (lambda i, stop: i < stop, lambda i: i * 2),
        (lambda i, stop: i != stop, lambda i: i + 1),
        (lambda i, stop: i < stop, lambda i: i - 1),
        (lambda i, stop: i < stop, lambda i: 1 - i),
    ],
)
def test_loops_that_count_otherwise_are_of_unknown_length(test, step):
    def fn(x):
        return lax.while_loop(lambda c: test(c[0], 10), lambda c: (step(c[0]), psum(c[1])), (1, x))[
            1
        ]

    with pytest.raises(ValueError, match="trip count"):
        measure(fn)


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


def test_scopes_cross_the_borders_of_functions():
    def fn(x):
        with jax.named_scope("step"):
            return jax.jit(in_scope(one_branch_of_two, "again.every64"))(x)

    assert measure(fn).by_scope() == {"step/algorithm/again.every64": PSUM / 64}


@pytest.mark.parametrize("name", ["cond", "body", "scan", "jit(step)", "vmap"])
def test_a_scope_may_have_the_name_of_a_part_of_a_program(name):
    fn = in_scope(lambda x: lax.scan(lambda x, _: (psum(x), None), x, length=2)[0], name)
    assert measure(fn).by_scope() == {f"algorithm/{name}": 2 * PSUM}


def test_of_traced_reads_a_whole_step():
    mesh = jax.sharding.AbstractMesh((4,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    @jax.jit
    def step(x):
        with jax.named_scope("step"):
            return jax.shard_map(
                in_scope(psum, "reduce"), mesh=mesh, in_specs=spec, out_specs=spec
            )(2 * x)

    measured = traffic.of_traced(step.trace(shape()))
    assert measured.by_scope() == {"step/algorithm/reduce": PSUM}
    assert traffic.of_traced(jax.make_jaxpr(step)(shape())) == measured
    with pytest.raises(TypeError, match=r"`traced` is of type Lowered; .*trace"):
        traffic.of_traced(step.trace(shape()).lower(lowering_platforms=("cpu",)))


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
        '-', 'collective_permute', '4', '3', '26,880.0', '1', '80,640.0',
    ]  # fmt: skip
    assert table[2].split() == ["total", "80,640.0"]


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
