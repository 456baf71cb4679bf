"""Calls of the training step: other arguments, another order, another batch, another loop."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import PARAMS, batch_of, loss_fn, mesh, train

TX = optax_ext.sparse_sgd(0.1, axis="data", density=0.25, allreduce=sc.allreduce.topk_a())
CHAIN = optax.chain(optax_ext.topk_a(0.1, axis="data"), optax.sgd(0.1))


def waiting(workers=4):
    """Parameters and state after a few steps, with something in the residuals."""
    return train(TX, loss_fn, PARAMS, [batch_of()] * 2, mesh(workers))[-1][:2]


def lowered_step(loss=loss_fn, tx=CHAIN, state=None, batch=None, workers=4, **options):
    state = optax_ext.init_state(tx, PARAMS, mesh(workers)) if state is None else state
    batch = batch_of() if batch is None else batch
    step = optax_ext.make_train_step(loss, tx, mesh(workers), **options)
    return step.lower(PARAMS, state, batch)


@pytest.mark.parametrize(("then", "now", "host"), [(4, 8, True), (8, 4, False), (1, 2, False)])
def test_a_state_of_another_number_of_workers(then, now, host):
    params, state = jax.device_get(waiting(then)) if host else waiting(then)
    params = jax.device_get(params)
    step = optax_ext.make_train_step(loss_fn, TX, mesh(now))
    message = f"opt_state is that of {then} workers, and the mesh has {now} along 'data'.*reshard"
    with pytest.raises(ValueError, match=message):
        step(params, state, batch_of())
    moved = optax_ext.reshard(state, optax_ext.init_state(TX, params, mesh(now)))
    params, after, _ = step(params, moved, batch_of())
    # A step knows one structure; the shapes are looked at again.
    with pytest.raises(ValueError, match=message):
        step(params, state, batch_of())
    step(params, after, batch_of())


def test_a_state_of_another_number_of_devices_of_a_worker():
    meshes = [mesh(sizes, ("data", "model")) for sizes in ((2, 4), (4, 2))]
    state = optax_ext.init_state(TX, PARAMS, meshes[0], specs=PartitionSpec())
    step = optax_ext.make_train_step(loss_fn, TX, meshes[1])
    message = "opt_state is that of 2 workers of 4 devices, and the mesh has 4 of 2 along 'data'"
    with pytest.raises(ValueError, match=message):
        step(PARAMS, state, batch_of())


MAKE, INIT = optax_ext.make_train_step, optax_ext.init_state
A_TX = r"got a GradientTransformation\w*"


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (MAKE, (TX, loss_fn, mesh()), "tx must be .*got the function loss_fn"),
        (MAKE, (loss_fn, TX, TX), f"mesh must be .*{A_TX}"),
        (MAKE, (loss_fn, TX, {"data": 8}), "mesh must be .*got a dict"),
        (MAKE, (0.5, TX, mesh()), "loss_fn must be a function"),
        (INIT, (PARAMS, TX, mesh()), "tx must be an optax.GradientTransformation, got a dict"),
        (INIT, (TX, mesh(), PARAMS), "params is a mesh"),
        (INIT, (mesh(), TX, PARAMS), "tx must be .*got a Mesh"),
        (INIT, (TX, PARAMS, TX), f"mesh must be .*{A_TX}"),
    ],
)
def test_arguments_in_another_order(function, arguments, message):
    order = "loss_fn, tx, mesh" if function is MAKE else "tx, params, mesh"
    write = "" if arguments[0] == 0.5 else rf".*Write optax_ext\.{function.__name__}\({order}\)"
    with pytest.raises(TypeError, match=message + write):
        function(*arguments)


def test_a_step_with_arguments_in_another_order_or_number():
    params, state = waiting()
    step, batch = optax_ext.make_train_step(loss_fn, TX, mesh()), batch_of()
    with pytest.raises(ValueError, match=r"changed places. Write step\(params, opt_state, batch\)"):
        step(state, params, batch)
    y = np.zeros(len(batch), np.float32)
    message = r"one batch, which may be any pytree, got 2 arg.*step\(params, opt_state, \(x, y\)\)"
    with pytest.raises(TypeError, match=message):
        step(params, state, batch, y)
    with pytest.raises(TypeError, match=re.escape("(x, y, z)")):
        step(params, state, batch, y, y)
    step(params, state, (batch, y))
    # Two numbers for two workers are no key.
    lowered_step(batch=(batch, np.arange(2, dtype=np.uint32)), workers=2)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            lambda p, b: (loss_fn(p, b), {"aux": 1.0}),
            {},
            "scalar, got a tuple of 2.*has_aux=True in optax_ext.make_train_step",
        ),
        (loss_fn, {"has_aux": True}, r"\(loss, aux\), as has_aux=True says, got an array"),
        (lambda p, b: None, {}, "scalar, got a NoneType"),
        (lambda p, b: b @ p["w"], {}, r"scalar, got an array of shape \(4, 4\).*loss.mean"),
        (lambda p, b: (b @ p["w"], 0), {"has_aux": True}, r"scalar, .*\(4, 4\).*loss.mean"),
    ],
)
def test_a_loss_of_another_form(loss, options, message):
    with pytest.raises(TypeError, match=f"loss_fn must return .*{message}"):
        lowered_step(loss, **options)


@pytest.mark.slow
def test_a_loss_that_is_averaged_over_the_workers_already():
    message = "loss_fn returned the same on every worker of axis 'data'.*pmean or psum.*twice"
    for reduce in (jax.lax.pmean, jax.lax.psum):
        with pytest.raises(ValueError, match=message):
            lowered_step(lambda p, b, reduce=reduce: reduce(loss_fn(p, b), "data"))
    # Statistics inside of a loss may be over all workers, and a constant is of none.
    lowered_step(lambda p, b: loss_fn(p, b - jax.lax.pmean(b.mean(), "data")))
    lowered_step(lambda p, b: 0.0)


@pytest.mark.slow
def test_a_chain_that_does_not_reduce_the_gradients():
    tx = optax.adam(1e-3)
    with pytest.raises(ValueError, match=r"opt_state has no sparse allreduce.*first in the chain"):
        lowered_step(tx=tx, state=tx.init(PARAMS))
    # One of the leaves is passed on as it is.
    parts = {"sparse": optax_ext.topk_a(0.1, axis="data"), "none": optax.identity()}
    tx = optax.multi_transform(parts, {"w": "sparse", "b": "none"})
    with pytest.raises(ValueError, match=r"updates\['b'\] of tx differ.*first in the chain"):
        lowered_step(tx=tx)


def test_parameters_that_an_earlier_step_took_over():
    step, batch = optax_ext.make_train_step(loss_fn, CHAIN, mesh()), batch_of()
    params = jax.device_put(PARAMS, NamedSharding(mesh(), PartitionSpec()))
    state = optax_ext.init_state(CHAIN, params, mesh())
    result = step(params, state, batch)
    message = r"has been deleted: an earlier step took it over.*jax\.numpy\.copy.*donate=False"
    with pytest.raises(ValueError, match=r"params\['b'\] " + message):
        step(params, result[1], batch)
    with pytest.raises(ValueError, match="opt_state.* " + message):
        step(result[0], state, batch)
    step(*result[:2], batch)


# What is in a batch.


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_in_a_batch(make):
    workers = 4

    def noisy(params, batch):
        x, key = batch
        x = jnp.where(jax.random.bernoulli(key[0], 0.5, x.shape), x, 0.0)
        return loss_fn(params, x)

    # Nothing waits yet, so that the loss is that of the parameters.
    state = optax_ext.init_state(TX, PARAMS, mesh(workers))
    step = optax_ext.make_train_step(noisy, TX, mesh(workers), donate=False)
    message = r"batch\[1\] is one PRNG key.*jax.random.split\(key, 4\).*batch\[1\]\[0\] in the loss"
    with pytest.raises(ValueError, match=message):
        step(PARAMS, state, (batch_of(), make(0)))
    keys = jax.random.split(make(0), workers)
    *_, loss = step(PARAMS, state, (batch_of(), keys))
    split = batch_of().reshape(workers, -1, 6)
    losses = [noisy(PARAMS, (split[i], keys[i : i + 1])) for i in range(workers)]
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize("scalar", [0.5, 3, np.float32(2.0), jnp.float32(1.0), True])
def test_scalars_in_a_batch(scalar):
    message = r"batch\['t'\] is a scalar.*jax.numpy.full\(4, x\), and take batch\['t'\]\[0\]"
    with pytest.raises(ValueError, match=message):
        lowered_step(lambda p, b: loss_fn(p, b["x"]), batch={"x": batch_of(), "t": scalar})


def test_a_batch_that_the_workers_do_not_divide():
    with pytest.raises(ValueError, match=r"batch\['y'\] has shape \(6,\).*multiple of the 4"):
        lowered_step(lambda p, b: jnp.sum(p["b"]), batch={"x": np.zeros((4, 2)), "y": np.zeros(6)})


# Where an axis is bound.


@pytest.mark.parametrize("mapped", ["pmap", "vmap", "shard_map"])
def test_an_axis_of_another_name(mapped):
    init, whole = optax_ext.sparse_adamw(0.1, axis="data").init, PartitionSpec()
    if mapped == "shard_map":
        init = jax.shard_map(init, mesh=mesh(8, "batch"), in_specs=whole, out_specs=whole)
    else:
        init = getattr(jax, mapped)(init, axis_name="batch")
    message = r"axis='data' is not bound here, where the axes are \('batch',\).*axis_name='data'"
    with pytest.raises(ValueError, match=message):
        init(jnp.ones((8, 3)))


@pytest.mark.parametrize("make", [partial(optax_ext.ok_topk, 0.1), optax_ext.dense])
def test_a_state_made_for_another_axis(make):
    state = optax_ext.init_state(make(axis="data"), PARAMS, mesh())
    message = r"state was made for axis='data', and the transformation has axis='dta'.*same tx"
    with pytest.raises(ValueError, match=message):
        lowered_step(tx=make(axis="dta"), state=state)
