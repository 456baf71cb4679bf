"""The traffic meter: functions, conditionals and loops, and the scopes that name them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from sparse_collectives import traffic
from tests.sparse_collectives import helpers
from tests.sparse_collectives.test_traffic import (
    PSUM,
    N,
    measure,
    psum,
    rotate,
    shape,
    words_of,
)


def scoped(fn, *names):
    """``fn`` in scopes, the outermost first."""
    if not names:
        return fn

    def run(x):
        with jax.named_scope(names[0]):
            return scoped(fn, *names[1:])(x)

    return run


def one_branch_of_two(x):
    return lax.cond(x[0] > 0, psum, lambda x: x, x)


def three_branches(x):
    return lax.switch(
        jnp.int32(x[0]),
        [lambda x: x, rotate, lambda x: lax.all_gather(x, "w").sum(0)],
        x,
    )


def chosen(fn, *names):
    return scoped(fn, "algorithm", *names)


# Conditionals.


@pytest.mark.parametrize(("fn", "worst"), [(one_branch_of_two, PSUM), (three_branches, 3 * N)])
def test_conditional_worst_and_best(fn, worst):
    assert measure(fn).words == worst
    assert measure(fn, conditional="best").words == 0


@pytest.mark.parametrize("heavy_branch", [True, False])
def test_periodic_scope_weighs_the_heavier_branch(heavy_branch):
    def fn(x):
        return lax.cond((x[0] > 0) == heavy_branch, psum, rotate, x)

    fn = scoped(fn, "again.every64")
    measured = measure(fn)
    assert measured.words == pytest.approx(PSUM / 64 + N * 63 / 64)
    assert measured == measure(fn, conditional="best")
    assert measured.by_scope() == {"again.every64": measured.words}


def test_periodic_scopes_nest_and_do_not_reach_into_the_branches():
    def around(branch):
        return lambda x: lax.cond(x[1] > 0, branch, lambda x: x, x)

    assert measure(scoped(around(one_branch_of_two), "again.every8")).words == PSUM / 8
    inner = scoped(one_branch_of_two, "inner.every4")
    measured = measure(scoped(around(inner), "outer.every8"))
    assert measured.words == pytest.approx(PSUM / 32)
    assert measured.collectives[0].scope == "outer.every8/inner.every4"


@pytest.mark.parametrize("name", ["balance", "algorithm", "algorithm/balance"])
def test_frequencies_weigh_by_branch_index(name):
    fn = chosen(three_branches, "balance")
    measured = measure(fn, frequencies={name: (0.5, 0.25, 0.25)})
    assert measured.words == 0.25 * N + 0.25 * 3 * N
    assert [row.weight for row in measured.collectives] == [0.25, 0.25]
    only_neighbours = measure(fn, frequencies={name: (0, 1, 0)})
    assert only_neighbours.words == N
    assert len(only_neighbours.collectives) == 1


def test_first_weight_of_a_cond_is_that_of_false():
    fn = chosen(one_branch_of_two, "balance")
    assert measure(fn, frequencies={"balance": (1, 0)}).words == 0
    assert measure(fn, frequencies={"balance": (0, 1)}).words == PSUM


def test_innermost_name_counts():
    fn = chosen(three_branches, "balance")
    frequencies = {"algorithm": (1, 0, 0), "balance": (0, 1, 0)}
    with pytest.raises(ValueError, match="algorithm"):
        measure(fn, frequencies=frequencies)
    outer = scoped(three_branches, "algorithm")
    assert measure(lambda x: fn(outer(x)), frequencies=frequencies).words == N


def test_frequencies_overrule_the_period():
    fn = chosen(one_branch_of_two, "again.every64")
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
        measure(chosen(three_branches, "balance"), frequencies=frequencies)


def test_bad_conditional():
    with pytest.raises(ValueError, match="'worst' or 'best'"):
        measure(psum, conditional="average")


# Loops.


def counting(start, stop, test, step):
    """A loop that counts, with a sum over the workers in each iteration."""

    def fn(x):
        return lax.while_loop(
            lambda c: test(c[0], c[2]), lambda c: (step(c[0]), psum(c[1]), c[2]), (start, x, stop)
        )[1]

    return fn


def given_bounds(x):
    def count(start, stop, x):
        return counting(start, stop, lambda i, stop: i < stop, lambda i: i + 1)(x)

    return jax.jit(count)(2, 7, x)


@pytest.mark.parametrize(
    ("fn", "trips"),
    [
        *(
            (lambda x, bounds=bounds: lax.fori_loop(*bounds, lambda i, x: psum(x), x), 5)
            for bounds in ((0, 5), (2, 7), (jnp.int32(0), jnp.int32(5)))
        ),
        (counting(1, 10, lambda i, stop: i <= stop, lambda i: i + 3), 4),
        (given_bounds, 5),
    ],
)
def test_a_loop_that_counts_counts_each_iteration(fn, trips):
    assert measure(fn).words == pytest.approx(trips * PSUM)


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
    with pytest.raises(ValueError, match="trip count"):
        measure(counting(1, 10, test, step))


def test_scan_and_conditionals_nest():
    def inside(x):
        return lax.fori_loop(0, 2, lambda i, x: three_branches(x), one_branch_of_two(x))

    def fn(x):
        return lax.scan(lambda x, _: (scoped(inside, "maybe")(x), None), x, None, length=3)[0]

    assert measure(fn).words == pytest.approx(3 * (PSUM + 2 * 3 * N))
    assert measure(fn, conditional="best").words == 0
    assert {row.scope for row in measure(fn).collectives} == {"maybe"}


def test_loop_of_unknown_length_needs_a_number():
    def unknown_trips(x):
        return lax.while_loop(lambda x: x[0] > psum(x)[0], psum, x)

    fn = scoped(unknown_trips, "search")
    with pytest.raises(ValueError, match=r"frequencies=\{'search': iterations\}"):
        measure(fn)
    measured = measure(fn, frequencies={"search": 2.5})
    assert measured.words == pytest.approx(3.5 * PSUM + 2.5 * PSUM)
    with pytest.raises(ValueError, match="named_scope"):
        measure(lambda x: lax.while_loop(lambda x: x[0] > 0, psum, x))


def test_loop_without_collectives_needs_none():
    def fn(x):
        return psum(lax.while_loop(lambda x: x[0] > 0, lambda x: x - 1, x))

    assert measure(fn).words == PSUM


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
    assert words_of(measure(lambda x: fn(fn(x)))) == [PSUM, PSUM]


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


# Scopes.


def test_function_called_from_several_scopes():
    exchange = jax.jit(psum)
    later = scoped(lambda x: exchange(exchange(x)), "b", "c")
    measured = measure(lambda x: later(scoped(exchange, "a")(x)))
    assert measured.by_scope() == {"a": PSUM, "b/c": 2 * PSUM}
    assert measured.by_scope(depth=1) == {"a": PSUM, "b": 2 * PSUM}


def test_conditional_in_a_called_function_sees_the_scopes_of_the_call():
    fn = chosen(jax.jit(three_branches), "balance")
    assert measure(fn, frequencies={"balance": (0, 1, 0)}).words == N


def test_scopes_survive_differentiation():
    def loss(x):
        return lax.ppermute(x * x, "w", [(0, 1), (1, 0)]).sum()

    measured = measure(lambda x: jax.value_and_grad(scoped(loss, "forward"))(x), P=2)
    assert measured.by_scope() == {"forward": 2 * N}


def test_scopes_cross_the_borders_of_functions():
    fn = scoped(jax.jit(chosen(one_branch_of_two, "again.every64")), "step")
    assert measure(fn).by_scope() == {"step/algorithm/again.every64": PSUM / 64}


@pytest.mark.parametrize("name", ["cond", "body", "scan", "jit(step)", "vmap"])
def test_a_scope_may_have_the_name_of_a_part_of_a_program(name):
    fn = chosen(lambda x: lax.scan(lambda x, _: (psum(x), None), x, length=2)[0], name)
    assert measure(fn).by_scope() == {f"algorithm/{name}": 2 * PSUM}


def test_of_traced_reads_a_whole_step():
    mesh, spec = helpers.abstract_mesh(w=4), PartitionSpec()
    reduce = jax.shard_map(chosen(psum, "reduce"), mesh=mesh, in_specs=spec, out_specs=spec)
    step = jax.jit(scoped(lambda x: reduce(2 * x), "step"))
    measured = traffic.of_traced(step.trace(shape()))
    assert measured.by_scope() == {"step/algorithm/reduce": PSUM}
    assert traffic.of_traced(jax.make_jaxpr(step)(shape())) == measured
    with pytest.raises(TypeError, match=r"`traced` is of type Lowered; .*trace"):
        traffic.of_traced(step.trace(shape()).lower(lowering_platforms=("cpu",)))
