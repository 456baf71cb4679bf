"""Derivatives: of a dense allreduce they are right, and of a sparse one they are an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers, nodes, table

WORKERS, NODES, SIZE = 4, (2, 2), 40
SELECTOR = sc.select.topk(density=0.25)
DENSE = ("dense", "dense_bucketed", "torus_2d")
EACH = table.ALLREDUCES | table.OVER_NODES


def weighted(name, weights):
    """A function of the accumulators: the weighted sum of the first worker's total."""
    allreduce = EACH[name].allreduce
    if name in table.OVER_NODES:
        state = nodes.initial(allreduce, SIZE, NODES)
        step = nodes.simulated_step(SELECTOR, allreduce, NODES)
        return lambda acc: step(acc.reshape(*NODES, SIZE), state)["total"][0, 0] @ weights
    state = allreduce.init(SIZE, WORKERS)
    select = helpers.simulated_select(SELECTOR, WORKERS)
    reduce = helpers.simulated_reduce(allreduce, WORKERS)

    def value(acc):
        coo, _ = select(acc, jax.vmap(lambda _: SELECTOR.init(SIZE))(acc))
        return reduce(coo, state)["total"][0] @ weights

    return value


@pytest.mark.parametrize("name", [name for name in EACH if name not in DENSE])
def test_no_sparse_allreduce_has_a_derivative(name):
    acc = jax.ShapeDtypeStruct((WORKERS, SIZE), jnp.float32)
    with pytest.raises(TypeError, match=r"no derivative: .* put jax.lax.stop_gradient around"):
        jax.eval_shape(jax.grad(weighted(name, jnp.ones(SIZE))), acc)


@pytest.mark.parametrize("name", ["partitioned_topk", "shared_random", "full_sums topk_a"])
def test_the_accumulator_alone_has_none_either(name):
    allreduce = (table.ALLREDUCES | {name: table.full_sums("topk_a")})[name].allreduce

    def reduced(acc):
        coo, _, _ = SELECTOR.select(jax.lax.stop_gradient(acc), SELECTOR.init(SIZE))
        total, *_ = allreduce.reduce(coo, allreduce.init(SIZE, WORKERS), axis="w", acc=acc)
        return jnp.sum(total.values)

    def value(acc):
        return sc.simulate(reduced, axis="w", axis_size=WORKERS)(acc)[0]

    with pytest.raises(TypeError, match="no derivative"):
        jax.eval_shape(jax.grad(value), jax.ShapeDtypeStruct((WORKERS, SIZE), jnp.float32))


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_total_is_differentiated_at_what_was_selected(name):
    acc, weights = np.random.default_rng(0).normal(size=(2, WORKERS, SIZE)).astype(np.float32)
    found = jax.jit(jax.grad(weighted(name, weights[0])))(acc)
    sent = np.abs(acc) >= np.sort(np.abs(acc))[:, -SIZE // 4, None]
    np.testing.assert_array_equal(found, sent * weights[0])


def test_what_is_outside_of_a_derivative_has_an_exchange():
    exchange = weighted("topk_a", jnp.ones(SIZE))
    acc = np.random.default_rng(1).normal(size=(WORKERS, SIZE)).astype(np.float32)
    found = jax.jit(jax.grad(lambda x: jnp.sum(x**2) + exchange(jax.lax.stop_gradient(x))))(acc)
    np.testing.assert_allclose(found, 2 * acc)
