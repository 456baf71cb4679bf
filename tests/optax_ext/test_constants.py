"""Constants in the arguments and results of ``data_parallel``, and errors of earlier calls."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import fails_in_the_step

MESH = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
TX = optax_ext.with_mesh(optax_ext.sparse_sgd(0.1, density=0.5, axis="data"), MESH)
PARAMS = {"w": np.full((6, 3), 0.1, np.float32)}
X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)


@jax.tree_util.register_pytree_node_class
class Module:
    """As a module of equinox, in which a float decides the program."""

    def __init__(self, rate):
        self.rate = rate

    def tree_flatten(self):
        return (self.rate,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_constants_that_change_at_each_step_are_noticed_once():
    @optax_ext.data_parallel
    def step(params, state, module, x):
        return params, state, jnp.mean(x) if module.rate > 0 else jnp.mean(x) * 2

    state = TX.init(PARAMS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(10):
            step(PARAMS, state, Module(0.5 + k), X)
    (found,) = [x for x in caught if "compiles the step anew" in str(x.message)]
    assert "from 7.5 to 8.5" in str(found.message)
    assert found.filename == __file__


def test_constants_in_results_are_of_the_call_and_not_of_another_shape():
    @optax_ext.data_parallel
    def step(params, state, x):
        return params, state, float(len(x)), f"{len(x)} examples"

    state, found = TX.init(PARAMS), []
    for n in (4, 8, 4):
        found.append(step(PARAMS, state, X[:n])[2:])
    assert found == [(2.0, "2 examples"), (4.0, "4 examples"), (2.0, "2 examples")]


@pytest.mark.parametrize(("first", "second"), [(True, 1.0), (1.0, True), (0.0, -0.0)])
def test_constants_that_are_equal_are_not_the_same(first, second):
    @optax_ext.data_parallel
    def step(params, state, module, x):
        return repr(module.rate)

    state = TX.init(PARAMS)
    for rate in (first, second, first):
        assert step(PARAMS, state, Module(rate), X) == repr(rate)


@pytest.mark.parametrize("donate", [False, True])
def test_an_error_that_was_caught_does_not_come_back_in_another_training(donate):
    def checked(x):
        if x > 100:
            raise RuntimeError("a bad example")
        return x

    @optax_ext.data_parallel(donate=donate)
    def step(params, state, x):
        def loss_fn(params):
            seen = jax.pure_callback(checked, jax.ShapeDtypeStruct((), x.dtype), jnp.max(x))
            return jnp.mean((x @ params["w"]) ** 2) * (1 + 0 * seen)

        gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state))
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def begun():
        return jax.tree.map(jnp.array, PARAMS), TX.init(PARAMS)

    params, state = step(*begun(), X)
    fails_in_the_step(lambda: step(*begun(), X + 1000), "a bad example")
    for count in range(2, 6):
        params, state = step(params, state, X)
        assert int(optax_ext.get_state(state).count) == count
