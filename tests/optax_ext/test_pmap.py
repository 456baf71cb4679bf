"""Programs of ``jax.pmap`` in which workers differ, without types that say so."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import fails_in_the_step, normal, refused

WORKERS = 4
PARAMS = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4), "b": np.zeros(4, "f4")}
BATCH = normal((WORKERS, 3, 6))
OPTIMIZERS = {
    "sparse_adamw": optax_ext.sparse_adamw(1e-2, axis="data"),
    "powersgd": optax.chain(optax_ext.powersgd(1, axis="data"), optax.adam(1e-2)),
    "quantized": optax.chain(optax_ext.quantized(axis="data"), optax.adam(1e-2)),
    "dense": optax.chain(optax_ext.dense(axis="data"), optax.adam(1e-2)),
}
DIFFERENT = "the workers have different parameters where tx.init is called"


def made(tx, key, dtype=jnp.float32):
    params = jax.tree.map(
        lambda x: (x + 1e-3 * jax.random.normal(key, x.shape)).astype(dtype), PARAMS
    )
    return params, tx.init(params)


def step_of(tx):
    def step(params, state, x):
        def loss_fn(p):
            return jnp.mean((x @ p["w"] + p["b"][None]) ** 2)

        gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state))
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_workers_that_begin_with_different_parameters_are_noticed(name, dtype):
    tx = OPTIMIZERS[name]
    create = jax.pmap(lambda key: made(tx, key, dtype), axis_name="data")
    keys = jax.random.split(jax.random.key(0), WORKERS)
    fails_in_the_step(lambda: create(keys), match=DIFFERENT)
    same = jnp.stack([keys[0]] * WORKERS)
    params, state = create(same)
    if dtype == jnp.float32:
        params, _ = jax.pmap(step_of(tx), axis_name="data")(params, state, BATCH)
        np.testing.assert_array_equal(params["w"], jnp.stack([params["w"][0]] * WORKERS))
    jax.effects_barrier()


def test_in_a_simulation_init_may_be_called_with_what_differs():
    tx = optax_ext.topk_a(0.5, axis="w")
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2)
    assert step(normal((2, 6))).shape == (2, 6)


@pytest.mark.parametrize("out_axes", [0, None])
def test_a_state_with_one_row_for_all_workers_is_noticed(out_axes):
    tx = OPTIMIZERS["sparse_adamw"]
    create = jax.pmap(
        lambda _: (PARAMS, tx.init(PARAMS)), axis_name="data", out_axes=(None, out_axes)
    )
    params, state = create(jnp.arange(WORKERS))
    step = jax.pmap(
        step_of(tx),
        axis_name="data",
        in_axes=(None, out_axes, 0),
        out_axes=(None, out_axes),
    )
    monitor = optax_ext.Monitor(lambda step, values: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            params, state = step(params, state, BATCH)
            monitor(state)
    found = [str(x.message) for x in caught if "residual" in str(x.message)]
    copied = np.max(optax_ext.metrics(state)["copied"])
    if out_axes == 0:
        assert (found, copied) == ([], 0)
    else:
        assert copied == WORKERS - 1
        (text,) = found
        assert "in_axes=0 and out_axes=0" in text


def test_errors_have_advice_for_pmap():
    tx = OPTIMIZERS["sparse_adamw"]
    refused(r"jax.pmap\(create, axis_name='data'\)", tx.init, PARAMS)
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    state = optax_ext.init_state(tx, PARAMS, mesh)
    step = jax.pmap(step_of(tx), axis_name="data", in_axes=(None, None, 0))
    refused(r"jax.pmap has no in_specs: .*in_axes=0", step, PARAMS, state, BATCH)


@pytest.mark.parametrize("way", ["pmap", "simulate"])
def test_an_update_of_the_look_ahead_parameters_is_noticed(way):
    tx = OPTIMIZERS["sparse_adamw"]

    def step(params, x):
        state = tx.init(params)
        params = optax_ext.ahead(params, state)
        gradients = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        updates, _ = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates)

    run = jax.pmap(step, axis_name="data", in_axes=(None, 0))
    if way == "simulate":
        run = sc.simulate(lambda x: step(PARAMS, x), axis="data", axis_size=WORKERS)
    with pytest.warns(UserWarning, match="given the look-ahead parameters") as found:
        run(*((PARAMS, BATCH) if way == "pmap" else (BATCH,)))
    assert [x.filename for x in found] == [__file__]
