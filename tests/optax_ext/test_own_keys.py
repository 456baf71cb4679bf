"""Random keys in a step of ``data_parallel``: a worker's own, but not the keys of an optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import optax_ext

# The noise of optax mixes dtypes.
pytestmark = pytest.mark.usefixtures("default_promotion")
WORKERS = 2
MESH = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
PARAMS = {"w": np.full((6, 3), 0.1, np.float32)}
X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
KEY = jax.random.key(7)
DENSE = optax_ext.dense(axis="data")


class Wrapped(NamedTuple):
    key: Any
    inner: Any


def noisy(tx, made, parts):
    """A transformation of a user, around ``tx`` if there is one, with a key in its state."""

    def init(params):
        return made(jax.random.key(5), tx.init(params) if tx else ())

    def update(updates, state, params=None):
        key, inner = parts(state)
        if tx:
            updates, inner = tx.update(updates, inner, params)
        drawn = jax.random.normal(key, updates["w"].shape)
        return {"w": updates["w"] + 0.1 * drawn}, made(jax.random.split(key)[0], inner)

    return optax.GradientTransformation(init, update)


IN_DICT = noisy(None, lambda key, _: {"key": key}, lambda state: (state["key"], ()))
NOISY = {
    "noisy_sgd": optax.chain(DENSE, optax.noisy_sgd(0.05, key=3)),
    "typed key": optax.chain(DENSE, optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    "inner chain": optax.chain(optax.chain(DENSE), optax.chain(optax.add_noise(0.1, 0.5, 3))),
    "groups": optax.partition(
        {"w": optax.chain(DENSE, optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1))}, {"w": "w"}
    ),
    "wrapper": noisy(optax.chain(DENSE, optax.sgd(0.1)), Wrapped, tuple),
    "dictionary": optax.chain(DENSE, IN_DICT),
    "named": optax.named_chain(("sum", DENSE), ("noise", optax.add_noise(0.1, 0.5, 3))),
}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - x[:, :3]) ** 2)


def stepped(tx, params, state, x):
    gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state), x)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def of_each(key):
    return [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(WORKERS)]


def shards(x):
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def test_a_key_that_a_step_leaves_as_it_is_comes_back_as_it_was():
    """Its worker draws by another one of its own, also in a module."""
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    tx = optax_ext.with_mesh(optax.chain(DENSE, optax.sgd(0.1)), MESH)

    @optax_ext.data_parallel
    def step(model, params, state, x, keys):
        drawn = jax.random.normal(keys["a"]) + jnp.sum(model(jnp.ones(64)))
        return params, state, {"a": keys["a"], "b": jax.random.split(keys["b"])[0]}, drawn

    given, state, drawn = {"a": KEY, "b": KEY}, tx.init(PARAMS), []
    kept = jax.random.key_data(model.rngs.key[...])
    for _ in range(2):
        _, _, keys, total = step(model, PARAMS, state, X, given)
        drawn.append(float(total))
    data = jax.tree.map(jax.random.key_data, (given, keys))
    np.testing.assert_array_equal(data[1]["a"], data[0]["a"])
    assert (data[1]["b"] != data[0]["b"]).any()
    np.testing.assert_array_equal(jax.random.key_data(model.rngs.key[...]), kept)
    assert drawn[0] != drawn[1], "the module counts its draws"


def test_a_result_of_a_key_alone_is_the_mean_over_the_workers():
    tx = optax_ext.with_mesh(optax.chain(DENSE, optax.sgd(0.05)), MESH)

    @optax_ext.data_parallel
    def step(params, state, key, x):
        params, state = stepped(tx, params, state, x)
        drawn = jax.random.uniform(key)
        return {"w": params["w"] + drawn}, state, drawn

    params, _, drawn = step(PARAMS, tx.init(PARAMS), KEY, X)
    assert float(drawn) == pytest.approx(np.mean(of_each(KEY)))
    first, *others = shards(params["w"])
    assert all(first.tobytes() == other.tobytes() for other in others)


@pytest.mark.parametrize("name", NOISY)
def test_noise_after_the_exchange_is_the_same_on_all_workers(name):
    tx = NOISY[name]
    expected, state = PARAMS, optax_ext.init_state(tx, PARAMS, MESH)
    usual = optax_ext.make_train_step(loss_fn, tx, MESH, donate=False)
    step = optax_ext.data_parallel(lambda *args: stepped(tx, *args))
    params, mine = PARAMS, state
    for _ in range(3):
        expected, state, _ = usual(expected, state, X)
        params, mine = step(params, mine, X)
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-4)
    first, *others = shards(params["w"])
    assert all(first.tobytes() == other.tobytes() for other in others)


class TrainState(struct.PyTreeNode):
    params: Any
    opt_state: Any
    key: Any


class Carried(NamedTuple):
    params: Any
    tx_state: Any
    key: Any


class Aux(NamedTuple):
    dropout: Any


MADE = {
    "dataclass": TrainState,
    "named tuple": Carried,
    "tuple": lambda *fields: fields,
    "dictionary": lambda params, state, key: {"a": params, "b": state, "c": key},
    "part": lambda params, state, key: (params, state, Aux(key)),
    "part of a dictionary": lambda p, state, key: {"a": p, "opt_state": state, "z": Aux(key)},
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_key_that_the_training_carries_is_a_workers_own(made):
    tx = NOISY["typed key"]

    @optax_ext.data_parallel
    def step(carried, x):
        params, state, key = jax.tree.leaves(carried, is_leaf=lambda x: x is not carried)
        (key,) = jax.tree.leaves(key)
        params, state = stepped(tx, params, state, x)
        return made(params, state, key), jax.random.uniform(key)

    carried = made(PARAMS, optax_ext.init_state(tx, PARAMS, MESH), KEY)
    carried, drawn = step(carried, X)
    assert float(drawn) == pytest.approx(np.mean(of_each(KEY)))
    usual = optax_ext.make_train_step(loss_fn, tx, MESH)
    expected, _, _ = usual(PARAMS, optax_ext.init_state(tx, PARAMS, MESH), X)
    np.testing.assert_allclose(jax.tree.leaves(carried)[0], expected["w"], rtol=1e-4)
