"""Calls with arguments in another order, of another kind, or from another loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import optax_ext
import sparse_collectives as sc

PARAMS = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4), "b": np.zeros(4, "f4")}
TX = optax_ext.sparse_sgd(0.1, axis="data", density=0.25, exchange=sc.allreduce.topk_a())


def mesh(workers=4):
    return jax.make_mesh(
        (workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


def loss_fn(params, batch):
    x = batch[0] if isinstance(batch, tuple) else batch
    return jnp.mean((x @ params["w"] + params["b"][None] - 1) ** 2)


def batch(workers=8):
    return np.random.default_rng(0).standard_normal((2 * workers, 6)).astype(np.float32)


def waiting(workers=4, tx=TX, steps=2):
    """Parameters and state after a few steps, with something in the residuals."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optax_ext.init_state(tx, params, mesh(workers))
    step = optax_ext.make_train_step(loss_fn, tx, mesh(workers))
    for _ in range(steps):
        params, state, _ = step(params, state, batch())
    assert np.abs(optax_ext.get_state(state).residual).max() > 0
    return params, state


# The ends of a training.


@pytest.mark.parametrize("function", [optax_ext.flush, optax_ext.consolidate])
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a chain"])
def test_arguments_that_have_changed_places(function, wrapped):
    tx = optax.chain(optax.identity(), TX) if wrapped else TX
    params, state = waiting(tx=tx)
    name = function.__name__
    with pytest.raises(ValueError, match=rf"changed places. Write optax_ext\.{name}\(params, opt"):
        function(state, params)
    applied, empty = function(params, state)
    assert not np.asarray(optax_ext.get_state(empty).residual).any()
    moved = [
        np.any(np.asarray(a) != np.asarray(b))
        for a, b in zip(jax.tree.leaves(applied), jax.tree.leaves(params), strict=True)
    ]
    assert any(moved)


@pytest.mark.parametrize("function", [optax_ext.flush, optax_ext.consolidate])
def test_a_state_without_residuals(function):
    params = jax.tree.map(jnp.asarray, PARAMS)
    for state in (optax.adamw(0.1).init(params), (), {"w": jnp.zeros(3)}):
        with pytest.raises(ValueError, match="opt_state has no residuals"):
            function(params, state)
    # Of the dense mean nothing waits, so that a loop need not know which of the two it has.
    tx = optax.chain(optax_ext.dense(axis="data"), optax.sgd(0.1))
    applied, _ = optax_ext.flush(params, optax_ext.init_state(tx, params, mesh()))
    jax.tree.map(np.testing.assert_array_equal, applied, params)


def of_pmap(workers=4):
    """The state of a loop over pmap, with something in the residuals."""
    devices = jax.devices()[:workers]
    params = jax.tree.map(lambda x: np.stack([x] * workers), PARAMS)
    state = jax.pmap(TX.init, axis_name="data", devices=devices)(params)

    def step(params, state, x):
        gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state), x)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.pmap(step, axis_name="data", devices=devices)
    split = batch().reshape(workers, -1, 6)
    for _ in range(2):
        params, state = step(params, state, split)
    return jax.device_get(params), jax.device_get(state)


def test_a_state_of_pmap_outside_of_it():
    params, state = of_pmap()
    one = jax.tree.map(lambda x: x[0], params)
    fresh = optax_ext.init_state(TX, one, mesh())
    message = r"opt_state is a state of jax\.pmap: its residual has shape \(4, 1, 28\)"
    for function in (optax_ext.flush, optax_ext.consolidate):
        with pytest.raises(ValueError, match=message) as error:
            function(one, state)
    step = optax_ext.make_train_step(loss_fn, TX, mesh())
    with pytest.raises(ValueError, match=message):
        step(one, state, batch())
    with pytest.raises(ValueError, match=r"a state of jax\.pmap"):
        optax_ext.reshard(state, fresh)
    # What the message says to write is the state of all workers.
    names = {"jax": jax, "optax_ext": optax_ext, "opt_state": state}
    exec("\n".join(line.strip() for line in str(error.value).splitlines()[1:]), names)
    joined = names["opt_state"]
    np.testing.assert_array_equal(joined.residual, state.residual[:, 0])
    assert jax.tree.map(jnp.shape, joined) == jax.tree.map(jnp.shape, fresh)
    flushed, _ = optax_ext.flush(one, joined)
    expected = state.residual.mean((0, 1))
    moved = np.concatenate([(flushed[k] - one[k]).ravel() for k in ("b", "w")])
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)
    step(one, joined, batch())


# The step.


@pytest.mark.parametrize(("then", "now"), [(4, 8), (8, 4), (1, 2), (2, 1)])
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_a_state_of_another_number_of_workers(then, now, host):
    params, state = waiting(then)
    params = jax.device_get(params)
    state = jax.device_get(state) if host else state
    step = optax_ext.make_train_step(loss_fn, TX, mesh(now))
    message = f"opt_state is that of {then} workers, and the mesh has {now} along 'data'.*reshard"
    with pytest.raises(ValueError, match=message):
        step(params, state, batch())
    moved = optax_ext.reshard(state, optax_ext.init_state(TX, params, mesh(now)))
    params, after, _ = step(params, moved, batch())
    # A step knows one structure; the shapes are looked at again.
    with pytest.raises(ValueError, match=message):
        step(params, state, batch())
    step(params, after, batch())


def test_a_state_of_another_number_of_devices_of_a_worker():
    sizes = {"data": 2, "model": 4}, {"data": 4, "model": 2}
    meshes = [
        jax.make_mesh(tuple(of.values()), tuple(of), axis_types=(AxisType.Auto,) * 2)
        for of in sizes
    ]
    whole = PartitionSpec()
    state = optax_ext.init_state(TX, PARAMS, meshes[0], specs=whole)
    step = optax_ext.make_train_step(loss_fn, TX, meshes[1])
    message = "opt_state is that of 2 workers of 4 devices, and the mesh has 4 of 2 along 'data'"
    with pytest.raises(ValueError, match=message):
        step(PARAMS, state, batch())


def test_make_train_step_and_init_state_with_arguments_in_another_order():
    order = r"Write optax_ext\.make_train_step\(loss_fn, tx, mesh\)"
    with pytest.raises(TypeError, match=f"tx must be .*got the function loss_fn. {order}"):
        optax_ext.make_train_step(TX, loss_fn, mesh())
    with pytest.raises(
        TypeError, match=rf"mesh must be .*got a GradientTransformation\w*. {order}"
    ):
        optax_ext.make_train_step(loss_fn, TX, TX)
    with pytest.raises(TypeError, match=f"mesh must be .*got a dict. {order}"):
        optax_ext.make_train_step(loss_fn, TX, {"data": 8})
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        optax_ext.make_train_step(0.5, TX, mesh())
    order = r"Write optax_ext\.init_state\(tx, params, mesh\)"
    for arguments, message in (
        ((PARAMS, TX, mesh()), "tx must be an optax.GradientTransformation, got a dict"),
        ((TX, mesh(), PARAMS), "params is a mesh"),
        ((mesh(), TX, PARAMS), "tx must be .*got a Mesh"),
        ((TX, PARAMS, TX), "mesh must be .*got a GradientTransformation"),
    ):
        with pytest.raises(TypeError, match=f"{message}.*{order}"):
            optax_ext.init_state(*arguments)


def test_a_step_with_arguments_in_another_order_or_number():
    params, state = waiting()
    step = optax_ext.make_train_step(loss_fn, TX, mesh())
    with pytest.raises(ValueError, match=r"changed places. Write step\(params, opt_state, batch\)"):
        step(state, params, batch())
    y = np.zeros(len(batch()), np.float32)
    message = r"one batch, which may be any pytree, got 2 arg.*step\(params, opt_state, \(x, y\)\)"
    with pytest.raises(TypeError, match=message):
        step(params, state, batch(), y)
    with pytest.raises(TypeError, match=re.escape("(x, y, z)")):
        step(params, state, batch(), y, y)
    step(params, state, (batch(), y))


# What is in a batch.


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_in_a_batch(make):
    workers = 4

    def noisy(params, batch):
        x, key = batch
        x = jnp.where(jax.random.bernoulli(key[0], 0.5, x.shape), x, 0.0)
        return loss_fn(params, x)

    params, state = waiting(workers)
    step = optax_ext.make_train_step(noisy, TX, mesh(workers), donate=False)
    message = r"batch\[1\] is one PRNG key.*jax.random.split\(key, 4\).*batch\[1\]\[0\] in the loss"
    with pytest.raises(ValueError, match=message):
        step(params, state, (batch(), make(0)))
    keys = jax.random.split(make(0), workers)
    *_, loss = step(params, state, (batch(), keys))
    here = optax_ext.ahead  # Of each worker: what waits is applied before the loss.
    split = batch().reshape(workers, -1, 6)
    losses = [
        noisy(jax.tree.map(lambda x, i=i: x[i], at), (split[i], keys[i : i + 1]))
        for at in [
            sc.simulate(here, axis="data", axis_size=workers, in_axes=(None, 0))(
                params, rows_of(state, workers)
            )
        ]
        for i in range(workers)
    ]
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def rows_of(state, workers):
    """The state of each worker, as it is inside of the mapped function."""
    specs = optax_ext.state_specs(state)
    return jax.tree.map(
        lambda spec, x: x[:, None] if len(spec) else jnp.stack([x] * workers), specs, state
    )


@pytest.mark.parametrize("scalar", [0.5, 3, np.float32(2.0), jnp.float32(1.0), True])
def test_scalars_in_a_batch(scalar):
    step = optax_ext.make_train_step(lambda p, b: loss_fn(p, b["x"]), TX, mesh())
    state = optax_ext.init_state(TX, PARAMS, mesh())
    message = r"batch\['t'\] is a scalar.*jax.numpy.full\(4, x\), and take batch\['t'\]\[0\]"
    with pytest.raises(ValueError, match=message):
        step(PARAMS, state, {"x": batch(), "t": scalar})


def test_two_numbers_for_two_workers_are_no_key():
    step = optax_ext.make_train_step(loss_fn, TX, mesh(2))
    state = optax_ext.init_state(TX, PARAMS, mesh(2))
    step.lower(PARAMS, state, (batch(), np.arange(2, dtype=np.uint32)))


# Where an axis is bound.


@pytest.mark.parametrize("mapped", ["pmap", "vmap", "shard_map"])
def test_an_axis_of_another_name(mapped):
    tx = optax_ext.sparse_adamw(0.1, axis="data")
    init = {
        "pmap": lambda x: jax.pmap(tx.init, axis_name="batch")(x),
        "vmap": lambda x: jax.vmap(tx.init, axis_name="batch")(x),
        "shard_map": lambda x: jax.shard_map(
            tx.init,
            mesh=jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,)),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )(x),
    }[mapped]
    message = r"axis='data' is not bound here, where the axes are \('batch',\).*axis_name='data'"
    with pytest.raises(ValueError, match=message):
        init(jnp.ones((8, 3)))


def test_an_init_that_someone_else_calls_names_them():
    with pytest.raises(
        ValueError,
        match=r"not bound here.*init_state.*jax\.set_mesh.*TrainState.*nnx\.Optimizer.*with_mesh",
    ):
        TX.init(PARAMS)
