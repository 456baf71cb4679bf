"""What a trace costs and what it reads: each branch is traced once, and only arguments matter."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import mesh, normal, refused, same

WORKERS, EVERY = 4, 3
PARAMS = {"kernel": jnp.ones((32, 8)), "bias": jnp.zeros(8)}
BATCHES = normal((EVERY, 16, 32))


def loss_fn(params, x):
    return jnp.mean((x @ params["kernel"] + params["bias"][None] - 1) ** 2)


def counted(traces):
    """A selector that notes each of its traces."""
    selector = sc.select.topk(density=0.1)

    def select(acc, state):
        traces.append(acc)
        return selector.select(acc, state)

    return selector._replace(select=select)


def ok_topk(selector, **options):
    exchange = sc.allreduce.ok_topk(density=0.1)
    reduce = optax_ext.sparse_allreduce(selector, exchange, axis="data", **options)
    return optax.chain(reduce, optax.sgd(0.1))


def sgd(selector, **options):
    return optax_ext.sparse_sgd(0.1, axis="data", density=0.1, selector=selector, **options)


KINDS = {
    "chain": ok_topk,
    "dense steps": lambda s: ok_topk(s, dense_steps=3),
    "multi_steps": lambda s: optax_ext.multi_steps(ok_topk(s), 3),
    "multi_steps, dense steps": lambda s: optax_ext.multi_steps(ok_topk(s, dense_steps=3), 3),
    "rounds": lambda s: sgd(s, every=10),
    "rounds, dense steps": lambda s: sgd(s, every=10, dense_steps=2),
    "local_steps": lambda s: optax_ext.local_steps(optax.adam(0.1), ok_topk(s), every=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_branch_is_traced_once(kind):
    traces = []
    tx = KINDS[kind](counted(traces))
    state = optax_ext.init_state(tx, PARAMS, mesh(WORKERS))
    step = optax_ext.make_train_step(loss_fn, tx, mesh(WORKERS))
    assert not traces
    step.trace(PARAMS, state, BATCHES[0])
    assert len(traces) == 1


def jitted(tx):
    return optax.GradientTransformationExtraArgs(jax.jit(tx.init), jax.jit(tx.update))


def by_steps(tx):
    step = optax_ext.make_train_step(loss_fn, tx, mesh(WORKERS), donate=False)
    return lambda params, state: step(params, state, BATCHES[0])[:2]


def by_rounds(tx):
    take = optax_ext.make_train_round(loss_fn, tx, mesh(WORKERS), donate=False)
    return lambda params, state: take(params, state, BATCHES)[:2]


def by_data_parallel(tx):
    @optax_ext.data_parallel
    def step(params, state, x):
        gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state), x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return lambda params, state: step(params, state, BATCHES[0])


LOOPS = {
    "steps": (by_steps, lambda: sgd(None)),
    "steps of rounds": (by_steps, lambda: sgd(None, every=EVERY)),
    "rounds": (by_rounds, lambda: sgd(None, every=EVERY)),
    "data_parallel": (by_data_parallel, lambda: ok_topk(sc.select.topk(density=0.1))),
}


def trained(loop, tx, params=PARAMS):
    state = optax_ext.init_state(tx, params, mesh(WORKERS))
    take = loop(tx)
    for _ in range(4):
        params, state = take(params, state)
    return params, state


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.one_in(4)
def test_jitted_functions_train_alike(kind):
    loop, make = LOOPS[kind]
    plain, again = trained(loop, make()), trained(loop, jitted(make()))
    same(again, plain)
    assert float(jnp.max(jnp.abs(plain[0]["kernel"] - 1))) > 0.01


@pytest.mark.slow
def test_a_jitted_update_of_rounds_and_then_of_steps():
    """jit's cache has the phase of a round in its key: it is a part of the state's tree."""
    tx = jitted(sgd(None, every=EVERY))
    params, state = trained(by_rounds, tx)
    for _ in range(EVERY):
        params, state = by_steps(tx)(params, state)
    plain = sgd(None, every=EVERY)
    expected, known = trained(by_rounds, plain)
    for _ in range(EVERY):
        expected, known = by_steps(plain)(expected, known)
    same((params, state), (expected, known))


def test_an_inner_transformation_sees_no_phase():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(set(extra))
        return optax.scale(-0.1).update(updates, state, params)

    local = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    exchange = sc.select.topk(density=0.1), sc.allreduce.topk_a()
    reduce = optax_ext.sparse_allreduce(*exchange, axis="data", every=EVERY, local=local)
    tx = optax.inject_hyperparams(lambda rate: optax.chain(reduce, optax.scale(rate)))(rate=1.0)
    params, _ = trained(by_rounds, tx)
    assert {frozenset(x) for x in seen} == {frozenset({"value"})}
    assert float(jnp.max(jnp.abs(params["kernel"] - 1))) > 0.01


def test_init_on_the_mesh_of_set_mesh_under_jit():
    tx = ok_topk(sc.select.topk(density=0.1))
    with jax.set_mesh(mesh(WORKERS)):
        same(jax.jit(tx.init)(PARAMS), tx.init(PARAMS))


def test_a_jitted_init_of_sharded_parameters_is_refused():
    on = mesh((2, 2), ("data", "model"))
    kernel = jax.device_put(PARAMS["kernel"], NamedSharding(on, P("model")))
    params = {"kernel": kernel, "bias": jax.device_put(PARAMS["bias"], NamedSharding(on, P()))}
    tx = ok_topk(sc.select.topk(density=0.1))
    refused(
        "does not see how its parameters are sharded", optax_ext.init_state, jitted(tx), params, on
    )
    inside = optax.GradientTransformationExtraArgs(tx.init, jitted(tx).update)
    found = optax_ext.get_state(optax_ext.init_state(inside, params, on))
    assert found.layout.sharding.axes == ("model",)


def test_computed_parameters_among_sharded_ones_are_refused():
    on = mesh((2, 2), ("data", "model"))
    kernel = jax.device_put(PARAMS["kernel"], NamedSharding(on, P("model")))
    tx = ok_topk(sc.select.topk(density=0.1))

    def init(params):
        return tx.init({**params, "bias": params["bias"] + params["kernel"][0]})

    odd = optax.GradientTransformationExtraArgs(init, tx.update)
    params = {"kernel": kernel, "bias": jax.device_put(PARAMS["bias"], NamedSharding(on, P()))}
    refused("of which 1 are those of init_state", optax_ext.init_state, odd, params, on)


@pytest.mark.slow
def test_two_threads_trace_at_once():
    def train(kind):
        loop, make = LOOPS[kind]
        return trained(loop, make())

    kinds = ["rounds", "steps of rounds"] * 2
    with concurrent.futures.ThreadPoolExecutor(len(kinds)) as pool:
        together = list(pool.map(train, kinds))
    for kind, found in zip(kinds, together, strict=True):
        same(found, train(kind))


def test_init_state_compiles_no_more_with_a_transformation_behind():
    traces = []
    tx = optax.chain(sgd(counted(traces)), optax.ema(0.9))
    params = {str(i): np.ones((8, 8), np.float32) for i in range(60)}
    optax_ext.init_state(tx, params, mesh(WORKERS))
    assert not traces
