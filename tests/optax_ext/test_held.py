"""A step that is not finite changes nothing, for any optimizer after the exchange."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _held, _wrappers
from tests.optax_ext.helpers import bits, mesh, normal, slow

WORKERS = 4
PARAMS = {"b": normal(5, 1), "w": normal((6, 4), 2)}
# 0.0 added to it would change its sign.
PARAMS["b"][0] = -0.0
LABELS = {"b": "one", "w": "other"}
OK_TOPK = functools.partial(optax_ext.ok_topk, 0.3, axis="data")
ADAMW = optax.adamw(0.1, weight_decay=0.1)


def dense():
    return optax_ext.dense(axis="data")


def sparse(**options):
    return optax_ext.sparse_adamw(0.1, axis="data", weight_decay=0.1, **options)


def groups(one, other):
    return optax.partition({"one": one, "other": other}, LABELS)


CHAINS = {
    "adamw": lambda: optax.chain(OK_TOPK(), ADAMW),
    "momentum": lambda: optax.chain(optax_ext.powersgd(1, axis="data"), optax.sgd(0.1, 0.9)),
    "quantized": lambda: optax.chain(optax_ext.quantized(axis="data"), ADAMW),
    "decay without a state": lambda: optax.chain(
        OK_TOPK(), optax.add_decayed_weights(0.1), optax.scale(-0.1)
    ),
    "dense": lambda: optax.chain(dense(), ADAMW),
    "dense leaves": lambda: optax.chain(OK_TOPK(dense_leaves=optax_ext.small_leaves()), ADAMW),
    "bucketed": lambda: optax.chain(optax_ext.bucketed(OK_TOPK(), 2), ADAMW),
    "sparse and dense": lambda: groups(sparse(), optax.chain(dense(), ADAMW)),
    "dense and sparse": lambda: groups(optax.chain(dense(), ADAMW), sparse()),
    "two sparse": lambda: groups(sparse(), optax_ext.sparse_sgd(0.1, axis="data")),
    "propagate beside skip": lambda: groups(sparse(), sparse(nonfinite="propagate")),
    "injected": lambda: optax.inject_hyperparams(optax_ext.sparse_adamw)(0.1, axis="data"),
    "whole": sparse,
    "multi_steps": lambda: optax_ext.multi_steps(optax.chain(OK_TOPK(), ADAMW), 1),
    "sparse and rounds": lambda: groups(sparse(), sparse(every=2)),
    "schedule_free": lambda: optax.contrib.schedule_free(
        optax.chain(OK_TOPK(), optax.sgd(0.1)), 0.1
    ),
}


def loss_fn(params, batch):
    x, bad = batch
    spoiled = jnp.where(bad[0] > 0, jnp.nan, 1.0)
    return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2) * x[0, 0] * spoiled


def by_step(tx):
    return optax_ext.make_train_step(loss_fn, tx, mesh(WORKERS), donate=False)


def by_data_parallel(tx):
    tx = optax_ext.with_mesh(tx, mesh(WORKERS))

    @optax_ext.data_parallel
    def step(params, opt_state, batch):
        ahead = optax_ext.ahead(params, opt_state)
        loss, gradients = jax.value_and_grad(loss_fn)(ahead, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def batch(number, bad=False):
    return normal((2 * WORKERS, 6), number), np.eye(2 * WORKERS, dtype=np.float32)[2] * bad


def counted(opt_state):
    """The steps that each reduction has skipped, and the state without these numbers."""

    def without(node):
        if isinstance(node, SparseAllreduceState):
            return node._replace(skipped=())
        return dataclasses.replace(node, skipped=()) if isinstance(node, DenseState) else node

    kinds = SparseAllreduceState | DenseState
    rest = jax.tree.map(without, opt_state, is_leaf=lambda node: isinstance(node, kinds))
    return [int(node.skipped) for node in _wrappers.reductions(opt_state)], rest


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((by_step, name) for name in ("adamw", "dense", "sparse and dense", "two sparse")),
        *(slow(by_step, name) for name in CHAINS),
        (by_data_parallel, "adamw"),
        *(slow(by_data_parallel, name) for name in ("dense", "two sparse", "bucketed")),
    ],
)
@pytest.mark.one_in(4)
def test_nothing_changes_and_the_next_step_is_as_without(way, name):
    tx = CHAINS[name]()
    step, state = way(tx), optax_ext.init_state(tx, PARAMS, mesh(WORKERS))
    params = PARAMS
    for number in range(2):
        params, state, _ = step(params, state, batch(number))
    held, held_state, loss = step(params, state, batch(2, bad=True))
    assert np.isnan(loss)
    assert bits(held) == bits(params)
    (before, rest), (after, rest_after) = counted(state), counted(held_state)
    assert bits(rest_after) == bits(rest)
    assert after == [x + 1 for x in before], "every group counts it"
    # Without a trace: all that follows is as if that step had not been.
    next_params, next_state, _ = step(held, held_state, batch(3))
    params_without, state_without, _ = step(params, state, batch(3))
    assert bits(next_params) == bits(params_without) != bits(params)
    assert bits(counted(next_state)[1]) == bits(counted(state_without)[1])


OVER_STEPS = {
    "multi_steps": lambda: optax_ext.multi_steps(optax.chain(OK_TOPK(), ADAMW), 2),
    "MultiSteps": lambda: optax.MultiSteps(optax.chain(OK_TOPK(), ADAMW), 2),
    "delayed": lambda: optax_ext.delayed(optax.chain(OK_TOPK(), ADAMW)),
    "local_steps": lambda: optax_ext.local_steps(
        ADAMW, optax.chain(dense(), optax.sgd(1.0)), every=2
    ),
}


@pytest.mark.parametrize("name", ["multi_steps", *map(slow, list(OVER_STEPS)[1:])])
def test_a_group_that_accumulates_over_steps_loses_none_of_them(name):
    """Its updates are of more steps than the one that another group skips."""
    tx, ends = groups(sparse(), OVER_STEPS[name]()), []
    step = by_step(tx)
    for bad in (None, 1, 2):
        params, state = PARAMS, optax_ext.init_state(tx, PARAMS, mesh(WORKERS))
        of_group = []
        for number in range(4):
            before = params
            params, state, _ = step(params, state, batch(number, bad=number == bad))
            assert (bits(params["b"]) == bits(before["b"])) == (number == bad)
            of_group.append(bits(params["w"]))
        ends.append(of_group)
    assert ends[0] == ends[1] == ends[2]
    assert len({*map(tuple, ends[0])}) > 1


@pytest.mark.parametrize(
    "after",
    [
        optax.sgd(lambda count: jnp.where(count == 2, jnp.inf, 0.1)),
        slow(optax.adamw(lambda count: 0.1 / jnp.where(count == 2, 0.0, 1.0))),
    ],
)
@pytest.mark.parametrize("reduce", [OK_TOPK, slow(dense)])
def test_updates_that_are_not_finite_are_not_applied(reduce, after):
    tx = optax.chain(reduce(), after)
    step, params = by_step(tx), PARAMS
    state = optax_ext.init_state(tx, params, mesh(WORKERS))
    for number in range(4):
        before = params
        params, state, _ = step(params, state, batch(number))
        assert (bits(before) == bits(params)) == (number >= 2)
    assert counted(state)[0] == [2]


def test_a_float16_eps_of_zero_behind_the_exchange_is_held():
    params = jax.tree.map(lambda x: x.astype(np.float16), PARAMS)
    tx = optax.chain(OK_TOPK(), optax.adam(0.1))
    step = optax_ext.make_train_step(
        lambda p, b: loss_fn(jax.tree.map(lambda x: x.astype(jnp.float32), p), b),
        tx,
        mesh(WORKERS),
        donate=False,
    )
    after, state, _ = step(params, optax_ext.init_state(tx, params, mesh(WORKERS)), batch(0))
    assert bits(after) == bits(params)
    assert counted(state)[0] == [1]


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(OK_TOPK, nonfinite="propagate"),
        functools.partial(OK_TOPK, nonfinite="drop"),
        functools.partial(OK_TOPK, local=optax.scale(-0.1), every=3),
    ],
)
def test_what_skips_no_step_gets_no_choice(make):
    """The program is the same as without."""
    tx = optax.chain(make(), ADAMW)
    state = optax_ext.init_state(tx, PARAMS, {"data": 2})
    one = jax.tree.map(lambda x, s: x[:1] if len(s) else x, state, optax_ext.state_specs(state))

    def program(tx):
        traced = jax.make_jaxpr(tx.update, axis_env=[("data", 2)])
        return str(traced(jax.tree.map(jnp.asarray, PARAMS), one, PARAMS))

    assert program(_held.held(tx)) == program(tx)


def test_an_infinite_rate_decays_nothing():
    """In rounds a step counts that no worker has taken."""
    for every in (1, 3):
        rate = lambda count: 0.1 / jnp.where(count == 0, 0.0, 1.0)  # noqa: E731
        tx = optax_ext.sparse_adamw(rate, axis="data", weight_decay=0.1, every=every)
        step, state = by_step(tx), optax_ext.init_state(tx, PARAMS, mesh(WORKERS))
        params, state, _ = step(PARAMS, state, batch(0))
        assert all(np.isfinite(x).all() for x in params.values())


def test_a_schedule_goes_on_for_a_worker_that_missed_a_step():
    def rate(count):
        return jnp.where(count < 4, 1.0, 0.0)

    for tx in (
        optax_ext.sparse_sgd(
            rate, density=1.0, every=2, axis="data", allreduce=sc.allreduce.topk_a()
        ),
        optax_ext.local_steps(optax.sgd(rate), optax.chain(dense(), optax.sgd(1.0)), every=2),
    ):
        params = {"w": np.zeros(4, np.float32)}
        step = optax_ext.make_train_step(lambda p, x: p["w"] @ x[0], tx, mesh(2))
        state = optax_ext.init_state(tx, params, mesh(2))
        for number in range(6):
            x = np.ones((2, 4), np.float32)
            if number < 3:
                x[0] = np.nan
            before = jax.device_get(params)
            params, state, _ = step(params, state, x)
        assert bits(before) == bits(params), "the rate is 0 for all workers"
        missed = [x for x in jax.tree.leaves(state) if np.asarray(x).tolist() == [3, 0]]
        assert len(missed) == 1


@pytest.mark.parametrize(("exchange", "few"), [("dense", 4), ("topk_a", 4), slow("powersgd", 18)])
def test_a_program_grows_with_its_leaves_and_not_with_their_square(exchange, few):
    """Each leaf reads whether all are finite, which its kernel would compute again."""
    made = {
        "dense": dense,
        "topk_a": lambda: optax_ext.topk_a(0.3, axis="data"),
        "powersgd": lambda: optax_ext.powersgd(1, axis="data"),
    }[exchange]()
    tx, on = optax.chain(made, ADAMW), mesh(2)

    def loss(params, x):
        return sum(jnp.sum((x @ w) ** 2) for w in params.values())

    def lines(leaves):
        params = {f"w{i}": normal((4, 4 + i)) for i in range(leaves)}
        state = optax_ext.init_state(tx, params, on)
        step = optax_ext.make_train_step(loss, tx, on)
        text = step.lower(params, state, np.ones((2, 4), np.float32)).compile().as_text()
        return text.count("\n")

    assert lines(3 * few) < 3.5 * lines(few)
