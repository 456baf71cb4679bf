"""A loop that skips step after step gets one warning, and waits for nothing."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._train import _skipped
from tests.optax_ext.helpers import by_data_parallel

WORKERS = 2
MESH = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
PARAMS = {"w": np.full((6, 3), 0.1, np.float32)}
GOOD = np.ones((4, 6), np.float32)
BAD = np.where(np.arange(4)[:, None] == 3, np.nan, GOOD).astype(np.float32)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def by_step(tx):
    return optax_ext.make_train_step(loss_fn, tx, MESH)


def by_round(tx):
    step = optax_ext.make_train_round(loss_fn, tx, MESH)
    return lambda params, state, x: step(params, state, np.stack([x, x]))


WAYS = {
    "dense": (by_step, None, "all workers skipped 10 steps"),
    "step": (by_step, None, "all workers skipped 10 steps"),
    "every": (by_step, 2, "a worker left out its 10 steps"),
    "round": (by_round, 2, "a worker left out its 20 steps"),
    "local steps": (by_step, None, "a worker left out its 10 steps"),
    "data_parallel": (
        functools.partial(by_data_parallel, loss_fn),
        None,
        "all workers skipped 10 steps",
    ),
}


def warned(way, batches):
    make, every, _ = WAYS[way]
    tx = optax_ext.sparse_sgd(0.1, density=0.5, axis="data", every=every)
    if way == "local steps":
        tx = optax_ext.published.sparse_loco(optax.sgd(0.1), density=0.5, axis="data", every=2)
    if way == "dense":
        tx = optax.chain(optax_ext.dense(axis="data"), optax.sgd(0.1))
    state, step = optax_ext.init_state(tx, PARAMS, MESH), make(tx)
    params = jax.tree.map(jnp.array, PARAMS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            params, state, _ = step(params, state, batch)
            jax.block_until_ready(params)
    return [x for x in caught if "in a row" in str(x.message)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_many_skipped_steps_in_a_row_are_named_once(way):
    (found,) = warned(way, [BAD] * 40)
    assert WAYS[way][2] in str(found.message)
    assert found.filename == __file__


def test_steps_that_are_skipped_among_others_are_not_named():
    assert not warned("step", [BAD] * 9 + [GOOD] * 3 + [BAD] * 9 + [GOOD] + [BAD] * 8)
    assert warned("step", [GOOD] * 15 + [BAD] * 30)


@pytest.mark.parametrize("way", ["step", "data_parallel"])
def test_the_counters_are_read_under_any_mesh_of_the_program(way):
    with jax.set_mesh(MESH):
        assert warned(way, [BAD] * 30)


def test_a_monitor_names_them_too():
    monitor = optax_ext.Monitor(lambda step, values: None, every=5)
    tx = optax_ext.topk_a(0.5, axis="data")
    state = optax_ext.init_state(tx, PARAMS, MESH)
    for skipped in (0, 4, 9):
        monitor(state._replace(skipped=jnp.int32(skipped)), 5)
    with pytest.warns(UserWarning, match="all workers skipped 11 steps") as found:
        monitor(state._replace(skipped=jnp.int32(20)), 10)
    assert found[0].filename == __file__
    monitor(state._replace(skipped=jnp.int32(90)), 15)


def test_a_state_without_counters_is_not_looked_at():
    watch = _skipped.Watch()
    for _ in range(30):
        watch.see({"w": jnp.ones(3)}, 1)
