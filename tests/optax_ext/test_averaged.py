"""Averaged gradients and a forgotten ``ahead``: told at trace time, also where no type tells."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import LOOPS, in_loop, mesh, normal

WORKERS, SIZE = 4, 12
PARAMS = {"w": jnp.ones((SIZE,)), "b": jnp.zeros(())}
AVERAGED = "the updates are the same on every worker of axis 'w'"
FORGOTTEN = "the gradients were taken at params"


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def batch():
    return normal((WORKERS, 3, SIZE))


def traced(loop, step, *given):
    """Traces a step of all workers; nothing runs."""
    jax.eval_shape(in_loop(loop, step, WORKERS), PARAMS, *given)


loops = pytest.mark.parametrize("loop", LOOPS)
TRANSFORMATIONS = {
    "topk_a": lambda: optax_ext.topk_a(0.5, axis="w"),
    "dense": lambda: optax_ext.dense(axis="w"),
    "chain": lambda: optax.chain(
        optax.clip(1.0), optax_ext.ok_topk(0.5, axis="w"), optax.adam(0.1)
    ),
    "multi_steps": lambda: optax_ext.multi_steps(optax_ext.topk_a(0.5, axis="w"), 2),
    "delayed": lambda: optax_ext.delayed(optax_ext.sparse_adamw(0.1, axis="w")),
    "bucketed": lambda: optax_ext.bucketed(optax_ext.topk_a(0.5, axis="w"), 2),
}


def step_of(tx, between=lambda g: g, at=optax_ext.ahead):
    def step(params, batch):
        state = tx.init(params)
        gradients = between(jax.grad(loss_fn)(at(params, state), batch))
        return tx.update(gradients, state, params)[0]

    return step


def summed_twice(gradients):
    return jax.tree.map(lambda g: lax.psum(g, "w") / WORKERS, gradients)


def gathered(gradients):
    return jax.tree.map(lambda g: lax.all_gather(g, "w").mean(0), gradients)


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))


def in_a_call(gradients):
    """By a function that is jitted by itself, and clipped by what is the same everywhere."""
    gradients = jax.jit(lambda g: lax.pmean(g, "w"))(gradients)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm_of(gradients)), gradients)


@loops
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_averaged_gradients_are_an_error_when_the_step_is_traced(name, loop):
    tx = TRANSFORMATIONS[name]()
    traced(loop, step_of(tx), batch())
    with pytest.raises(ValueError, match=AVERAGED):
        traced(loop, step_of(tx, lambda g: lax.pmean(g, "w")), batch())


@loops
@pytest.mark.parametrize("between", [summed_twice, gathered, in_a_call])
def test_other_ways_to_average(between, loop):
    with pytest.raises(ValueError, match=AVERAGED):
        traced(loop, step_of(TRANSFORMATIONS["topk_a"](), between), batch())


def clipped_by_all(gradients):
    """By the norm of the mean: the gradients are still each worker's own."""
    norm = norm_of(lax.pmean(gradients, "w"))
    return jax.tree.map(lambda g: g / norm, gradients)


def some_averaged(gradients):
    return {**gradients, "b": lax.pmean(gradients["b"], "w")}


def by_rank(gradients):
    """What all have, but not of the same sign."""
    sign = 1.0 - 2.0 * (lax.axis_index("w") % 2).astype(jnp.float32)
    return jax.tree.map(lambda g: sign * lax.pmean(g, "w"), gradients)


def in_groups(gradients):
    """In pairs: two different gradients remain."""
    pairs = [[0, 1], [2, 3]]
    return jax.tree.map(
        lambda g: jnp.sum(lax.all_gather(g, "w", axis_index_groups=pairs), 0), gradients
    )


def exchanged(gradients):
    around = [(i, (i + 1) % WORKERS) for i in range(WORKERS)]
    return jax.tree.map(lambda g: lax.ppermute(g, "w", around), gradients)


def one_of_all(gradients):
    """In a loop, whose equations are not those of a step."""

    def turn(_, g):
        shift = lax.axis_index("w").astype(jnp.float32)
        return jax.tree.map(lambda x: x + shift, lax.pmean(g, "w"))

    return lax.fori_loop(0, 2, turn, gradients)


@loops
@pytest.mark.parametrize(
    "between", [clipped_by_all, some_averaged, by_rank, in_groups, exchanged, one_of_all]
)
def test_what_may_differ_is_no_error(between, loop):
    if between is in_groups and loop == "simulate":
        pytest.skip("vmap has no groups")
    traced(loop, step_of(TRANSFORMATIONS["topk_a"](), between), batch())


@loops
def test_given_and_constant_gradients_are_no_error(loop):
    tx = TRANSFORMATIONS["topk_a"]()
    traced(loop, lambda params, _: tx.update(params, tx.init(params))[0], batch())
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    traced(loop, lambda params, _: tx.update(zeros, tx.init(params))[0], batch())


def test_one_worker_may_average():
    step = step_of(TRANSFORMATIONS["topk_a"](), lambda g: lax.pmean(g, "w"))
    in_loop("simulate", step, 1)(PARAMS, batch()[:1])


STEP_AHEAD = {
    "sparse_adamw": lambda: optax_ext.sparse_adamw(0.1, axis="w"),
    "sparse_sgd": lambda: optax_ext.sparse_sgd(0.1, density=0.1, axis="w"),
    "multi_steps": lambda: optax_ext.multi_steps(optax_ext.sparse_adamw(0.1, axis="w"), 2),
    "delayed": lambda: optax_ext.delayed(optax_ext.sparse_adamw(0.1, axis="w")),
}


def at_params(params, state):
    del state
    return params


def with_state(tx, at):
    """A step with the state as an argument, as loops have it."""

    def step(params, state, batch):
        gradients = jax.grad(loss_fn)(at(params, state), batch)
        return tx.update(gradients, state, params)

    return step


@pytest.mark.parametrize("name", STEP_AHEAD)
def test_a_forgotten_ahead_is_a_warning(name):
    tx = STEP_AHEAD[name]()
    devices = jax.devices()[:WORKERS]
    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), PARAMS)
    init = jax.pmap(tx.init, axis_name="w", devices=devices)
    state = jax.eval_shape(init, params)

    def trace(at):
        step = jax.pmap(with_state(tx, at), axis_name="w", devices=devices)
        jax.eval_shape(step, params, state, batch())

    trace(optax_ext.ahead)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        trace(at_params)


def test_a_forgotten_ahead_under_types():
    tx = STEP_AHEAD["sparse_adamw"]()
    on = mesh(8, "w")
    state = optax_ext.init_state(tx, PARAMS, on)
    specs = optax_ext.state_specs(state)

    def trace(at):
        step = jax.shard_map(
            lambda p, s, b: with_state(tx, at)(p, s, b)[1],
            mesh=on,
            in_specs=(P(), specs, P("w")),
            out_specs=specs,
        )
        jax.eval_shape(step, PARAMS, state, jnp.ones((8, SIZE)))

    trace(optax_ext.ahead)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        trace(lambda params, _: lax.pcast(params, "w", to="varying"))


def test_gradients_of_another_program_and_no_step_ahead_are_no_warning():
    tx = STEP_AHEAD["sparse_adamw"]()
    plain = optax_ext.sparse_adamw(0.1, axis="w", residual=optax_ext.residual())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced("simulate", lambda params, _: tx.update(params, tx.init(params), PARAMS)[0], batch())
        traced("simulate", step_of(plain, at=lambda p, _: p), batch())


def test_micro_batches_in_a_call():
    """The gradient of a scan is made from the point that it was given."""
    tx = STEP_AHEAD["sparse_adamw"]()

    def trace(at):
        def step(params, state, batch):
            where = at(params, state)

            def add(total, row):
                new = jax.grad(loss_fn)(where, row[None])
                return jax.tree.map(jnp.add, total, new), None

            zeros = jax.tree.map(jnp.zeros_like, where)
            gradients, _ = lax.scan(add, zeros, batch)
            return tx.update(gradients, state, params)

        state = sc.simulate(lambda _: tx.init(PARAMS), axis="w", axis_size=WORKERS)(batch())
        mapped = sc.simulate(step, axis="w", axis_size=WORKERS, in_axes=(None, 0, 0))
        jax.eval_shape(mapped, PARAMS, state, batch())

    trace(optax_ext.ahead)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        trace(at_params)
