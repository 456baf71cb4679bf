"""The traffic meter: functions, conditionals and loops, and the scopes that name them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from sparse_collectives import traffic
from tests.sparse_collectives import helpers
from tests.sparse_collectives.test_traffic import PSUM, N, measure, psum, rotate, shape


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
        jnp.int32(x[0]), [lambda x: x, rotate, lambda x: lax.all_gather(x, "w").sum(0)], x
    )


def around(branch):
    return lambda x: lax.cond(x[1] > 0, branch, lambda x: x, x)


BALANCE = scoped(three_branches, "algorithm", "balance")
MAYBE = scoped(one_branch_of_two, "algorithm", "balance.every64")
PERIODIC = [
    scoped(lambda x: lax.cond(x[0] > 0, psum, rotate, x), "again.every64"),
    scoped(lambda x: lax.cond(x[0] > 0, rotate, psum, x), "again.every64"),
]
# The outer scope belongs to a choice of its own.
BOTH = {"algorithm": (1, 0, 0), "balance": (0, 1, 0)}


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


def summed(start, stop):
    return lambda x: lax.fori_loop(start, stop, lambda i, x: psum(x), x)


UNKNOWN = scoped(lambda x: lax.while_loop(lambda x: x[0] > psum(x)[0], psum, x), "search")


def without_collectives(x):
    return psum(lax.while_loop(lambda x: x[0] > 0, lambda x: x - 1, x))


def nested(x):
    def inside(x):
        return lax.fori_loop(0, 2, lambda i, x: three_branches(x), one_branch_of_two(x))

    return lax.scan(lambda x, _: (scoped(inside, "maybe")(x), None), x, None, length=3)[0]


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


def twice(fn):
    return lambda x: fn(fn(x))


def both(x):
    return psum(x), rotate(x)


WORDS = {
    "the worst of two branches": (one_branch_of_two, {}, PSUM),
    "the best of two branches": (one_branch_of_two, {"conditional": "best"}, 0),
    "the worst of three": (three_branches, {}, 3 * N),
    # The period applies to the heavier branch, whichever it is.
    "a period": (PERIODIC[0], {}, PSUM / 64 + N * 63 / 64),
    "a period of the other branch": (PERIODIC[1], {}, PSUM / 64 + N * 63 / 64),
    "a period, best": (PERIODIC[0], {"conditional": "best"}, PSUM / 64 + N * 63 / 64),
    "a period ends at the branches": (scoped(around(one_branch_of_two), "a.every8"), {}, PSUM / 8),
    "a period in a period": (
        scoped(around(scoped(one_branch_of_two, "b.every4")), "a.every8"),
        {},
        PSUM / 32,
    ),
    **{
        f"frequencies of {name}": (BALANCE, {"frequencies": {name: (0.5, 0.25, 0.25)}}, N)
        for name in ("balance", "algorithm", "algorithm/balance")
    },
    # They overrule the period.
    "the first weight is that of false": (MAYBE, {"frequencies": {"balance.every64": (1, 0)}}, 0),
    "the second is that of true": (MAYBE, {"frequencies": {"balance.every64": (0, 1)}}, PSUM),
    "the innermost name counts": (
        lambda x: BALANCE(scoped(three_branches, "algorithm")(x)),
        {"frequencies": BOTH},
        N,
    ),
    "frequencies in a called function": (
        scoped(jax.jit(three_branches), "algorithm", "balance"),
        {"frequencies": {"balance": (0, 1, 0)}},
        N,
    ),
    "a loop": (summed(2, 7), {}, 5 * PSUM),
    "a loop of arrays": (summed(jnp.int32(0), jnp.int32(5)), {}, 5 * PSUM),
    "a loop that ends with its bound": (
        counting(1, 10, lambda i, stop: i <= stop, lambda i: i + 3),
        {},
        4 * PSUM,
    ),
    "a loop of given bounds": (given_bounds, {}, 5 * PSUM),
    # Its test is made once more than its body.
    "a loop of a number that is told": (UNKNOWN, {"frequencies": {"search": 2.5}}, 6 * PSUM),
    "a loop without collectives": (without_collectives, {}, PSUM),
    "all of these nested": (nested, {}, 3 * (PSUM + 2 * 3 * N)),
    "all of these nested, best": (nested, {"conditional": "best"}, 0),
    "jit": (twice(jax.jit(jax.jit(psum))), {}, 2 * PSUM),
    "checkpoint": (twice(jax.checkpoint(psum)), {}, 2 * PSUM),
    "custom_jvp": (twice(custom_jvp), {}, 2 * PSUM),
    "custom_vjp": (twice(custom_vjp), {}, 2 * PSUM),
    "a result that nothing uses": (lambda x: both(x)[1], {}, N),
    "that of a called function": (lambda x: jax.jit(both)(x)[0], {}, PSUM),
    "that of a branch": (lambda x: lax.cond(x[0] > 0, both, lambda x: (x, x), x)[1], {}, N),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_through_branches_loops_and_calls(name):
    fn, options, words = WORDS[name]
    assert measure(fn, **options).words == pytest.approx(words)


OTHERWISE = [
    (lambda i, stop: i < stop, lambda i: i * 2),
    (lambda i, stop: i != stop, lambda i: i + 1),
    (lambda i, stop: i < stop, lambda i: i - 1),
    (lambda i, stop: i < stop, lambda i: 1 - i),
]


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        *((counting(1, 10, *how), {}, "trip count") for how in OTHERWISE),
        (UNKNOWN, {}, r"frequencies=\{'search': iterations\}"),
        (lambda x: lax.while_loop(lambda x: x[0] > 0, psum, x), {}, "named_scope"),
        (psum, {"conditional": "average"}, "'worst' or 'best'"),
        *(
            (BALANCE, {"frequencies": frequencies}, message)
            for frequencies, message in (
                ({"balance": (0.5, 0.5)}, "3 branches"),
                ({"balance": (0.5, 0.5, 0.5)}, "sums to 1.5"),
                ({"balance": (1.5, -0.5, 0)}, ">= 0"),
                ({"balanced": (1, 0, 0)}, r"balanced.*algorithm/balance \(3 branches\)"),
                ({"balance": 3}, "loop"),
                (BOTH, "algorithm"),
            )
        ),
    ],
)
def test_uncountable_programs_are_errors_that_say_what_to_write(fn, options, message):
    with pytest.raises(ValueError, match=message):
        measure(fn, **options)


def test_checkpointed_collectives_count_again():
    def loss(x):
        square = scoped(lambda x: lax.all_gather(jnp.sin(x), "w") ** 2, "square")
        return jnp.sum(jax.checkpoint(square)(x))

    once, again = measure(jax.grad(loss)), measure(jax.value_and_grad(loss))
    assert [row.kind for row in once.collectives] == ["all_gather", "reduce_scatter"]
    assert [row.kind for row in again.collectives] == ["all_gather"] * 2 + ["reduce_scatter"]
    assert {row.scope for row in again.collectives} == {"square"}


EXCHANGE = jax.jit(psum)


def called_from_several(x):
    return scoped(twice(EXCHANGE), "b", "c")(scoped(EXCHANGE, "a")(x))


def in_a_loop(name):
    return scoped(lambda x: lax.scan(lambda x, _: (psum(x), None), x, length=2)[0], "step", name)


@pytest.mark.parametrize(
    ("fn", "scopes"),
    [
        (called_from_several, {"a": PSUM, "b/c": 2 * PSUM}),
        (jax.value_and_grad(scoped(lambda x: rotate(x * x).sum(), "forward")), {"forward": 2 * N}),
        (scoped(jax.jit(MAYBE), "step"), {"step/algorithm/balance.every64": PSUM / 64}),
        *(
            (in_a_loop(name), {f"step/{name}": 2 * PSUM})
            for name in ("cond", "body", "scan", "jit(step)", "vmap")
        ),
    ],
)
def test_scopes_are_those_of_the_program(fn, scopes):
    measured = measure(fn)
    assert measured.by_scope() == scopes
    if fn is called_from_several:
        assert measured.by_scope(depth=1) == {"a": PSUM, "b": 2 * PSUM}


def test_of_traced_reads_a_whole_step():
    mesh, spec = helpers.abstract_mesh(w=4), PartitionSpec()
    reduce = jax.shard_map(scoped(psum, "reduce"), mesh=mesh, in_specs=spec, out_specs=spec)
    step = jax.jit(scoped(lambda x: reduce(2 * x), "step"))
    measured = traffic.of_traced(step.trace(shape()))
    assert measured.by_scope() == {"step/reduce": PSUM}
    assert traffic.of_traced(jax.make_jaxpr(step)(shape())) == measured
    with pytest.raises(TypeError, match=r"`traced` is of type Lowered; .*trace"):
        traffic.of_traced(step.trace(shape()).lower(lowering_platforms=("cpu",)))
