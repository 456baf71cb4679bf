"""Calls of the training step: other arguments, another order, another batch, arrays given twice."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext._train import _arrays
from tests.optax_ext.helpers import (
    PARAMS,
    batch_of,
    bits,
    loss_fn,
    mesh,
    normal,
    refused,
    same,
    train,
)

TX = optax_ext.sparse_sgd(0.1, axis="data", density=0.25, allreduce=sc.allreduce.topk_a())
ADAMW = functools.partial(optax_ext.sparse_adamw, axis="data")
CHAIN = optax.chain(optax_ext.topk_a(0.1, axis="data"), optax.sgd(0.1))
BATCH = batch_of()


def waiting(workers=4):
    """Parameters and state after a few steps, with something in the residuals."""
    return train(TX, loss_fn, PARAMS, [BATCH] * 2, mesh(workers))[-1][:2]


def lowered_step(loss=loss_fn, tx=CHAIN, state=None, batch=BATCH, workers=4, **options):
    state = optax_ext.init_state(tx, PARAMS, mesh(workers)) if state is None else state
    step = optax_ext.make_train_step(loss, tx, mesh(workers), **options)
    return step.lower(PARAMS, state, batch)


@pytest.mark.parametrize(("then", "now", "host"), [(4, 8, True), (8, 4, False), (1, 2, False)])
@pytest.mark.one_in(3)
def test_a_state_of_another_number_of_workers(then, now, host):
    params, state = jax.device_get(waiting(then)) if host else waiting(then)
    params = jax.device_get(params)
    step = optax_ext.make_train_step(loss_fn, TX, mesh(now))
    message = f"opt_state was made for {then} workers, and the mesh has {now} along 'data'.*reshard"
    refused(message, step, params, state, BATCH)
    moved = optax_ext.reshard(state, optax_ext.init_state(TX, params, mesh(now)))
    params, after, _ = step(params, moved, BATCH)
    # A step records one structure, and checks the shapes again.
    refused(message, step, params, state, BATCH)
    step(params, after, BATCH)


def test_a_state_of_another_number_of_devices_of_a_worker():
    meshes = [mesh(sizes, ("data", "model")) for sizes in ((2, 4), (4, 2))]
    state = optax_ext.init_state(TX, PARAMS, meshes[0], specs=P())
    step = optax_ext.make_train_step(loss_fn, TX, meshes[1])
    message = "opt_state was made for 2 workers of 4 devices, and the mesh has 4 of 2 along 'data'"
    refused(message, step, PARAMS, state, BATCH)


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
    refused(message + write, function, *arguments, error=TypeError)


def test_a_step_with_arguments_in_another_order_or_number():
    params, state = waiting()
    step, y = optax_ext.make_train_step(loss_fn, TX, mesh()), np.zeros(len(BATCH), np.float32)
    write = r"changed places. Write step\(params, opt_state, batch\)"
    refused(write, step, state, params, BATCH)
    message = r"one batch, .* got 2 arg.*step\(params, opt_state, \(x, y\)\)"
    refused(message, step, params, state, BATCH, y, error=TypeError)
    refused(re.escape("(x, y, z)"), step, params, state, BATCH, y, y, error=TypeError)
    step(params, state, (BATCH, y))
    # Two numbers for two workers are not a key.
    lowered_step(batch=(BATCH[:2], np.arange(2, dtype=np.uint32)), workers=2)


HAS_AUX = {"has_aux": True}


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (lambda p, b: (loss_fn(p, b), {}), {}, "scalar, got a tuple of 2.*has_aux=True in optax_e"),
        (loss_fn, HAS_AUX, r"\(loss, aux\), as has_aux=True says, got an array"),
        (lambda p, b: None, {}, "scalar, got a NoneType"),
        (lambda p, b: b @ p["w"], {}, r"scalar, got an array of shape \(4, 4\).*loss.mean"),
        (lambda p, b: (b @ p["w"], 0), HAS_AUX, r"scalar, .*\(4, 4\).*loss.mean"),
    ],
)
def test_a_loss_of_another_form(loss, options, message):
    message = f"loss_fn must return .*{message}"
    refused(message, lowered_step, loss, error=TypeError, **options)


@pytest.mark.slow
def test_a_loss_that_is_averaged_over_the_workers_already():
    message = "loss_fn returned the same on every worker of axis 'data'.*pmean or psum.*twice"
    for reduce in (jax.lax.pmean, jax.lax.psum):
        refused(message, lowered_step, lambda p, b, reduce=reduce: reduce(loss_fn(p, b), "data"))
    # Statistics inside a loss may be over all workers, and a constant depends on no worker.
    lowered_step(lambda p, b: loss_fn(p, b - jax.lax.pmean(b.mean(), "data")))
    lowered_step(lambda p, b: 0.0)


@pytest.mark.slow
def test_a_chain_that_does_not_reduce_the_gradients():
    tx = optax.adam(1e-3)
    message = (
        r"opt_state has no sparse allreduce.*init_state\(tx, params, mesh\).*first in its chain"
    )
    refused(message, lowered_step, tx=tx, state=tx.init(PARAMS))
    # One of the leaves is passed on as it is.
    parts = {"sparse": optax_ext.topk_a(0.1, axis="data"), "none": optax.identity()}
    tx = optax.multi_transform(parts, {"w": "sparse", "b": "none"})
    refused(r"the update of params\['b'\] differs.*first in the chain", lowered_step, tx=tx)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_in_a_batch(make):
    workers = 4

    def noisy(params, batch):
        x, key = batch
        x = jnp.where(jax.random.bernoulli(key[0], 0.5, x.shape), x, 0.0)
        return loss_fn(params, x)

    # The residual is still 0, so the loss is taken at the parameters.
    state = optax_ext.init_state(TX, PARAMS, mesh(workers))
    step = optax_ext.make_train_step(noisy, TX, mesh(workers), donate=False)
    message = r"batch\[1\] is one PRNG key.*jax.random.split\(key, 4\).*batch\[1\]\[0\] in the loss"
    refused(message, step, PARAMS, state, (BATCH, make(0)))
    keys = jax.random.split(make(0), workers)
    *_, loss = step(PARAMS, state, (BATCH, keys))
    split = BATCH.reshape(workers, -1, 6)
    losses = [noisy(PARAMS, (split[i], keys[i : i + 1])) for i in range(workers)]
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


SCALAR = r"batch\['t'\] is a scalar.*jax.numpy.full\(4, x\), and take batch\['t'\]\[0\]"


@pytest.mark.parametrize(
    ("given", "message"),
    [(x, SCALAR) for x in (0.5, 3, np.float32(2.0), jnp.float32(1.0), True)]
    + [(np.zeros(6), r"batch\['t'\] has shape \(6,\).*multiple of the 4")],
)
def test_what_the_workers_do_not_divide_in_a_batch(given, message):
    batch = {"x": BATCH, "t": given}
    refused(message, lowered_step, lambda p, b: loss_fn(p, b["x"]), batch=batch)


# Arrays that a step took over, or that occur twice in what it is given: these are copied, and not
# donated twice.

WORKERS = 4
START = normal((6, 4))
MOMENTUM = optax.chain(optax_ext.topk_a(0.5, axis="data"), optax.sgd(0.1, momentum=0.9))
everywhere = functools.partial(jax.device_put, device=NamedSharding(mesh(), P()))


def loss_of_two(params, batch):
    x = batch["x"] if isinstance(batch, dict) else batch
    return jnp.mean((jnp.tanh(x @ params["a"]) + x @ params["b"] - 1) ** 2)


def begin(a, b, loss=loss_of_two, **options):
    params = {"a": a, "b": b, "none": jnp.zeros((0, 3))}
    step = optax_ext.make_train_step(loss, MOMENTUM, mesh(), **options)
    return step, params, optax_ext.init_state(MOMENTUM, params, mesh())


def trained(a, b, later=None):
    """The parameters; ``later`` changes parameters and state before the second step."""
    step, params, state = begin(a, b)
    for i in range(3):
        if i == 1 and later is not None:
            params, state = later(params, state)
        params, state, _ = step(params, state, normal((8, 6), 1 + i))
    return jax.device_get(params)


def one(place, other=None):
    w = jnp.asarray(START)
    return place(w), (other or place)(w)


TIED = {
    "one array": lambda: one(lambda x: x),
    "one on the mesh": lambda: (everywhere(START),) * 2,
    "put twice": lambda: one(everywhere),
    "one and its copy on the mesh": lambda: one(lambda x: x, everywhere),
    "one of the host": lambda: (START, START),
}


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.one_in(3)
def test_it_trains_as_two_arrays_of_the_same_values(tied):
    w, other = TIED[tied]()
    same(trained(w, other), trained(START.copy(), START.copy()))


def tied(params, state, copy):
    return {**params, "b": copy(params["a"])}, state


def shared_with_the_state(params, state, copy):
    # The velocity of sgd, whose state comes after the allreduce's state.
    trace, *rest = state[1]
    return params, (state[0], (trace._replace(trace=jax.tree.map(copy, params)), *rest))


@pytest.mark.parametrize("later", [tied, shared_with_the_state])
def test_what_is_one_buffer_between_two_steps(later):
    ends = [
        trained(START.copy(), START.copy(), lambda p, s, copy=copy: later(p, s, copy))
        for copy in (lambda x: x, jnp.copy)
    ]
    same(*ends)


@pytest.mark.slow
def test_parameters_in_the_batch():
    def distance(params, batch):
        mean = jnp.mean(batch["w"], 0)
        return loss_of_two(params, batch) + jnp.mean((params["a"] - mean) ** 2)

    ends = []
    for copy in (np.array, lambda x: x):
        step, params, state = begin(everywhere(START), everywhere(START.copy()), distance)
        stacked = everywhere(jnp.stack([START] * WORKERS))
        params["w"] = stacked
        state = optax_ext.init_state(MOMENTUM, params, mesh())
        for _ in range(2):
            batch = {"x": np.ones((8, 6), np.float32), "w": copy(params["w"])}
            params, state, _ = step(params, state, batch)
        ends.append(jax.device_get(params))
    same(*ends)
    message = r"batch\['w'\] has been deleted: an earlier step"
    refused(message, step, params, state, {**batch, "w": stacked})


def test_nothing_is_copied_that_occurs_once_and_without_donation_nothing_is_looked_at(monkeypatch):
    asked, batch = [], np.ones((8, 6), np.float32)
    monkeypatch.setattr(_arrays, "_buffers", lambda leaf: asked.append(1) or {id(leaf)})
    step, params, state = begin(everywhere(START), everywhere(START.copy()), donate=False)
    step(params, state, batch)
    assert not asked
    assert not params["a"].is_deleted()
    step, begun, fresh = begin(params["a"], params["b"])
    params, state = begun, fresh
    for i in range(3):
        params, state, _ = step(params, state, batch)
        # All leaves of the first step are looked at, and no leaf of later steps.
        assert bool(asked) == (i == 0)
        asked.clear()
    assert all(begun[name].is_deleted() for name in "ab")
    message = r"has been deleted: an earlier step took it over.*jax\.numpy\.copy.*donate=False"
    refused(r"params\['a'\] " + message, step, begun, state, batch)
    refused("opt_state.* " + message, step, params, fresh, batch)
    step(params, state, batch)


def test_a_loss_scale_of_a_power_of_two_changes_no_bit():
    scaled = optax.chain(optax.scale(1 / 1024), ADAMW(0.1))
    ends = [
        train(tx, loss, PARAMS, [batch_of(seed=i) for i in range(3)], mesh())[-1][0]
        for tx, loss in (
            (ADAMW(0.1), loss_fn),
            (scaled, lambda params, batch: 1024 * loss_fn(params, batch)),
        )
    ]
    assert bits(ends[0]) == bits(ends[1])
