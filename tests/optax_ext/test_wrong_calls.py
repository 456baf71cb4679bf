"""Steps with a state, parameters or a derivative that they can't have."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import PARAMS, batch_of, loss_fn, mesh, normal, refused

ADAMW = functools.partial(optax_ext.sparse_adamw, axis="data")
CHAIN = optax.chain(optax_ext.topk_a(0.1, axis="data"), optax.sgd(0.1))
BATCH = batch_of()


@pytest.mark.parametrize(
    "tx",
    [
        optax_ext.sparse_adamw(1e-2, axis="w", residual=optax_ext.residual()),
        optax.chain(optax_ext.quantized(axis="w"), optax.adam(1e-2)),
        optax.chain(optax_ext.ok_topk(0.1, axis="w"), optax.sgd(0.1)),
    ],
    ids=["sparse_adamw", "quantized", "ok_topk"],
)
def test_an_update_has_no_derivative(tx):
    def step(gradients):
        updates, _ = tx.update({"w": gradients}, tx.init({"w": gradients}), {"w": gradients})
        return jnp.sum(updates["w"])

    def total(gradients):
        return jnp.sum(sc.simulate(step, axis="w", axis_size=4)(gradients))

    refused(
        "A sparse exchange has no derivative", jax.grad(total), normal((4, 40)), error=TypeError
    )


def of_injected(rate):
    return optax.inject_hyperparams(optax_ext.sparse_adamw)(rate, axis="data")


@pytest.mark.parametrize(
    ("then", "difference"),
    [
        (ADAMW(lambda count: 0.1), r"only a state of tx has .local\[1\]\[1\].count"),
        (optax_ext.multi_steps(ADAMW(0.1), 2), "only a state of tx has .mini_step"),
        (of_injected(0.1), "only opt_state has .* and only a state of tx has"),
        (optax.chain(optax.clip(1.0), ADAMW(0.1)), r"only opt_state has .count and .* \[1\].count"),
    ],
    ids=["schedule", "multi_steps", "inject_hyperparams", "clip"],
)
def test_a_state_of_another_optimizer(then, difference):
    state = optax_ext.init_state(ADAMW(0.1), PARAMS, mesh())
    step = optax_ext.make_train_step(loss_fn, then, mesh())
    refused(f"opt_state was made by another optimizer.*{difference}", step, PARAMS, state, BATCH)


def test_a_state_that_was_restored_as_a_list():
    state = [*optax_ext.init_state(CHAIN, PARAMS, mesh())]
    step = optax_ext.make_train_step(loss_fn, CHAIN, mesh())
    refused("it is a list, and a state of tx a tuple", step, PARAMS, state, BATCH)


def test_one_count_for_all_workers():
    """As ``optax.tree.set`` gives every count."""
    tx = ADAMW(lambda count: 0.1)
    state = optax.tree.set(optax_ext.init_state(tx, PARAMS, mesh()), count=jnp.zeros((), jnp.int32))
    step = optax_ext.make_train_step(loss_fn, tx, mesh())
    message = "opt_state.allreduce.count is a single number, and was an array with a row for each"
    refused(message, step, PARAMS, state, BATCH)


@pytest.mark.parametrize("tx", [ADAMW(0.1), optax.chain(optax_ext.dense(axis="data"))])
def test_two_sets_of_parameters(tx):
    both = optax.LookaheadParams.init_synced(PARAMS)
    around = optax.lookahead(tx, 3, 0.5)
    state = optax_ext.init_state(around, both, mesh())
    step = optax_ext.make_train_step(lambda p, b: loss_fn(p.fast, b), around, mesh())
    refused("params are the two of optax.LookaheadParams", step, both, state, BATCH)


def test_what_is_no_parameter():
    state = optax_ext.init_state(ADAMW(0.1), PARAMS, mesh())
    step = optax_ext.make_train_step(loss_fn, ADAMW(0.1), mesh())
    error = {"error": TypeError}
    refused(r"params\['act'\]", step, {**PARAMS, "act": jax.nn.relu}, state, BATCH, **error)
    refused("params is None", step, None, state, BATCH, **error)
    for function in (optax_ext.flush, optax_ext.consolidate):
        refused("params is None", function, None, state, **error)
