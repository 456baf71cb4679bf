"""Averaged gradients and a forgotten ``ahead`` are found by types in tracing, or by the bits."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import helpers
from tests.optax_ext.helpers import LOOPS, in_loop, local_step, mesh, normal, on_mesh, refused, same

WORKERS, SIZE = 4, 12
PARAMS = {"w": jnp.ones((SIZE,)), "b": jnp.zeros(())}
BATCH = normal((WORKERS, 3, SIZE))
AVERAGED = "the updates are the same on every worker of axis 'w'"
FORGOTTEN = "the gradients were taken at params"
SAME = "all workers have the same gradients"
TOPK_A = optax_ext.topk_a(0.5, axis="w")
ADAMW = optax_ext.sparse_adamw(0.1, axis="w")
loops = pytest.mark.parametrize("loop", LOOPS)


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def traced(loop, step):
    """Traces a step of all workers; nothing runs."""
    jax.eval_shape(in_loop(loop, step, WORKERS), PARAMS, BATCH)


def step_of(tx, between=lambda g: g, at=optax_ext.ahead):
    def step(params, batch):
        state = tx.init(params)
        gradients = between(jax.grad(loss_fn)(at(params, state), batch))
        return tx.update(gradients, state, params)[0]

    return step


mean = functools.partial(lax.pmean, axis_name="w")


def each(function):
    return lambda gradients: jax.tree.map(function, gradients)


def clipped_in_a_call(gradients):
    """Averages in a separately jitted function and clips by a norm that is the same everywhere."""
    gradients = jax.jit(mean)(gradients)
    norm = optax.tree.norm(gradients)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), gradients)


AVERAGES = {
    "mean": mean,
    "sum": each(lambda g: lax.psum(g, "w") / WORKERS),
    "gathered": each(lambda g: lax.all_gather(g, "w").mean(0)),
    "in a call": clipped_in_a_call,
}


@loops
@pytest.mark.parametrize("how", AVERAGES)
def test_averaged_gradients_are_an_error_when_the_step_is_traced(how, loop):
    refused(AVERAGED, traced, loop, step_of(TOPK_A, AVERAGES[how]))


@pytest.mark.parametrize(
    "tx",
    [
        optax_ext.dense(axis="w"),
        optax.chain(optax.clip(1.0), optax_ext.ok_topk(0.5, axis="w"), optax.adam(0.1)),
        optax_ext.multi_steps(TOPK_A, 2),
        optax_ext.delayed(ADAMW),
        optax_ext.bucketed(TOPK_A, 2),
    ],
    ids=["dense", "chain", "multi_steps", "delayed", "bucketed"],
)
def test_whatever_is_around_the_exchange_says_so(tx):
    traced("pmap", step_of(tx))
    refused(AVERAGED, traced, "pmap", step_of(tx, mean))


def by_rank(gradients):
    sign = 1.0 - 2.0 * (lax.axis_index("w") % 2).astype(jnp.float32)
    return jax.tree.map(lambda g: sign * g, mean(gradients))


def in_a_loop(gradients):
    """Averages in a loop, whose equations are not in the step itself."""
    shift = each(lambda g: g + lax.axis_index("w").astype(jnp.float32))
    return lax.fori_loop(0, 2, lambda _, g: shift(mean(g)), gradients)


PAIRS, RING = [[0, 1], [2, 3]], [(i, (i + 1) % WORKERS) for i in range(WORKERS)]
MAY_DIFFER = {
    "local": lambda g: g,
    "clipped by all": lambda g: jax.tree.map(lambda x: x / optax.tree.norm(mean(g)), g),
    "some averaged": lambda g: {**g, "b": mean(g["b"])},
    "by rank": by_rank,
    "in pairs": each(lambda g: jnp.sum(lax.all_gather(g, "w", axis_index_groups=PAIRS), 0)),
    "exchanged": each(lambda g: lax.ppermute(g, "w", RING)),
    "in a loop": in_a_loop,
    "constant": each(jnp.zeros_like),
}


@loops
@pytest.mark.parametrize("how", MAY_DIFFER)
@pytest.mark.one_in(3)
def test_averaged_gradients_that_may_differ_are_no_error(how, loop):
    if how == "in pairs" and loop == "simulate":
        pytest.skip("vmap has no groups")
    traced(loop, step_of(TOPK_A, MAY_DIFFER[how]))


def test_given_gradients_and_those_of_one_worker_are_no_error():
    for loop in LOOPS:
        traced(loop, lambda params, _: TOPK_A.update(params, TOPK_A.init(params))[0])
    in_loop("simulate", step_of(TOPK_A, mean), 1)(PARAMS, BATCH[:1])


def at_params(params, state):
    del state
    return params


def with_state(tx, at):
    """A step with the state as an argument, as loops have it."""
    return local_step(tx, loss_fn, at)


def in_micro_batches(tx, at):
    """The gradient of a scan is made from the point that it was given."""

    def step(params, state, batch):
        where = at(params, state)

        def add(total, row):
            new = jax.grad(loss_fn)(where, row[None])
            return jax.tree.map(jnp.add, total, new), None

        zeros = jax.tree.map(jnp.zeros_like, where)
        return tx.update(lax.scan(add, zeros, batch)[0], state, params)

    return step


@pytest.mark.parametrize(
    ("tx", "make"),
    [
        (ADAMW, with_state),
        (ADAMW, in_micro_batches),
        (optax_ext.sparse_sgd(0.1, density=0.1, axis="w"), with_state),
        (optax_ext.multi_steps(ADAMW, 2), with_state),
        (optax_ext.delayed(ADAMW), with_state),
    ],
    ids=["sparse_adamw", "micro-batches", "sparse_sgd", "multi_steps", "delayed"],
)
def test_ahead_that_is_forgotten_is_a_warning(tx, make):
    def over_all(function, in_axes):
        return jax.pmap(function, axis_name="w", devices=jax.devices()[:WORKERS], in_axes=in_axes)

    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), PARAMS)
    state = jax.eval_shape(over_all(tx.init, 0), params)

    def trace(at):
        jax.eval_shape(over_all(make(tx, at), (None, 0, 0)), PARAMS, state, BATCH)

    trace(optax_ext.ahead)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        trace(at_params)


def test_ahead_that_is_forgotten_under_types():
    on = mesh(8, "w")
    state = optax_ext.init_state(ADAMW, PARAMS, on)
    specs = P(), optax_ext.state_specs(state)

    def trace(at):
        step = on_mesh(local_step(ADAMW, loss_fn, at), on, (*specs, P("w")), specs)
        jax.eval_shape(step, PARAMS, state, jnp.ones((8, SIZE)))

    trace(optax_ext.ahead)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        trace(lambda params, _: lax.pcast(params, "w", to="varying"))


def test_gradients_of_another_program_and_no_step_ahead_are_no_warning():
    plain = optax_ext.sparse_adamw(0.1, axis="w", residual=optax_ext.residual())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced("simulate", lambda p, _: ADAMW.update(p, ADAMW.init(p), PARAMS)[0])
        traced("simulate", step_of(plain, at=at_params))


@pytest.mark.parametrize(
    "before", [optax.add_decayed_weights(0.1), optax.adaptive_grad_clip(0.1)], ids=["decay", "clip"]
)
def test_a_transformation_before_it_may_read_the_parameters(before):
    tx = optax.chain(before, ADAMW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        helpers.train(tx, loss_fn, PARAMS, [jnp.ones((8, SIZE))], mesh(8, "w"))
    state = optax_ext.init_state(tx, PARAMS, mesh(8, "w"))
    specs = P(), optax_ext.state_specs(state)
    wrong = local_step(tx, loss_fn, lambda params, _: lax.pcast(params, "w", to="varying"))
    step = on_mesh(wrong, mesh(8, "w"), (*specs, P("w")), specs)
    with pytest.warns(UserWarning, match=FORGOTTEN) as found:
        jax.eval_shape(step, PARAMS, state, jnp.ones((8, SIZE)))
    assert "jax" not in found[0].filename.split("/")


ASSERT = optax_ext.assert_local_gradients(axis="w")


def checked(gradients):
    """The gradients after the check, in a simulation."""
    workers = jax.tree.leaves(gradients)[0].shape[0]
    step = sc.simulate(lambda g: ASSERT.update(g, ())[0], axis="w", axis_size=workers)
    made = step(gradients)
    jax.block_until_ready(made)
    jax.effects_barrier()
    return made


@pytest.mark.parametrize("loop", helpers.slow_but(["check_vma=False"], LOOPS))
def test_gradients_of_the_same_batch_are_an_error_in_the_step(loop):
    def step(params, batch):
        return step_of(optax.chain(ASSERT, TOPK_A))(params, lax.pmean(batch, "w"))

    helpers.fails_in_the_step(lambda: in_loop(loop, step, WORKERS)(PARAMS, BATCH), SAME)


@pytest.mark.slow
@loops
def test_local_gradients_pass_unchanged(loop):
    ends = [
        in_loop(loop, step_of(tx), WORKERS)(PARAMS, BATCH)
        for tx in (optax.chain(ASSERT, TOPK_A), TOPK_A)
    ]
    jax.effects_barrier()
    same(*ends)


ALIKE, OTHER = np.ones((WORKERS - 1, SIZE), "f4"), np.full((1, SIZE), 1.5, "f4")


@pytest.mark.parametrize(
    "gradients",
    [
        np.zeros((WORKERS, SIZE), np.float32),  # no evidence
        np.ones((1, SIZE), np.float32),  # one worker
        np.full((WORKERS, SIZE), np.nan, np.float32),  # a run that diverges
        np.sign(normal((WORKERS, SIZE))).astype(np.float16),  # all of the same magnitudes
        np.concatenate([ALIKE, OTHER]),
        np.concatenate([OTHER, ALIKE]),
        {"a": np.eye(2, dtype="f4")[0], "b": np.eye(2, dtype="f4")[1]},
    ],
    ids=["zero", "one worker", "NaN", "signs", "but the last", "but the first", "another leaf"],
)
def test_averaged_losses_that_are_no_error(gradients):
    jax.tree.map(np.testing.assert_array_equal, checked(gradients), gradients)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_averaged_gradients_are_seen_by_one_entry_that_is_not_zero(dtype):
    gradients = {"a": np.zeros((WORKERS, SIZE), dtype), "b": np.zeros(WORKERS, np.float32)}
    gradients["a"][:, 3] = -1e-7
    helpers.fails_in_the_step(lambda: checked(gradients), SAME)
