"""The programs of a group, on devices of one process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from optax_ext.elastic import _programs

PARAMS = {"w": jnp.ones((3, 4)), "none": jnp.zeros((0, 3))}
SPARSE = optax.chain(optax_ext.topk_a(0.3, axis="data"), optax.sgd(0.1))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + params["none"].sum()


@pytest.mark.parametrize(
    "tx",
    [optax_ext.multi_steps(SPARSE, 2), optax_ext.delayed(SPARSE)],
    ids=["accumulated", "delayed"],
)
def test_each_program_takes_what_another_returns_also_if_a_leaf_is_empty(tx):
    programs = _programs.Programs(loss_fn, tx, "data", jax.devices())
    rows = np.ones((2, 3), np.float32)
    # It is compiled for the first devices.
    group = programs.load(dict(enumerate(jax.devices()[2:4])), PARAMS, rows)

    def placed(spec, x):
        return jax.device_put(x, NamedSharding(group.mesh, spec))

    params = jax.tree.map(lambda x: placed(P(), x), PARAMS)
    state = jax.tree.map(placed, group.specs, optax_ext.init_state(tx, PARAMS, {"data": 2}))
    batch, mixed = placed(P("data"), np.tile(rows, (2, 1))), placed(P(), np.array([True, False]))
    for _ in range(2):
        params, state, _ = group.step(params, state, batch)
        params, state = group.admit(params, state, mixed)
        state = group.release(state, mixed)
    rows_of = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), state)
    assert rows_of == jax.tree.map(lambda x: x.shape, programs.fresh(2, 0, PARAMS))


@pytest.mark.usefixtures("default_promotion")
def test_a_newcomer_gets_complex_arrays():
    programs = _programs.Programs(
        lambda params, batch: jnp.sum(jnp.abs(params["c"] - batch.mean()) ** 2),
        optax.chain(optax.contrib.split_real_and_imaginary(SPARSE), optax.trace(0.9)),
        "data",
        jax.devices(),
    )
    params = {"c": np.array([1 + 2j, complex(-0.0, 3), -1j], np.complex64)}
    rows = np.ones((2, 3), np.float32)
    group = programs.load(dict(enumerate(jax.devices()[:2])), params, rows)
    whole = NamedSharding(group.mesh, P())
    first, states = jax.device_put(params, whole), [programs.fresh(2, i, params) for i in range(2)]
    velocity = params["c"] * 1j
    states = [(x[0], optax.TraceState({"c": jnp.asarray(velocity)})) for x in states]
    state = jax.tree.map(
        lambda spec, *x: jax.device_put(
            np.concatenate(x) if len(spec) else x[0], NamedSharding(group.mesh, spec)
        ),
        group.specs,
        *states,
    )
    # Each device has its own copy: the second worker comes with nothing.
    copies = [jax.device_put(x, d) for x, d in zip((velocity, velocity * 0), group.mesh.devices)]
    state[1].trace["c"] = jax.make_array_from_single_device_arrays((3,), whole, copies)
    copies = [jax.device_put(x, d) for x, d in zip((params["c"], velocity * 0), group.mesh.devices)]
    first["c"] = jax.make_array_from_single_device_arrays((3,), whole, copies)
    given, got = group.admit(first, state, jax.device_put(np.array([True, False]), whole))
    for old, new in ((params, given), ({"c": velocity}, got[1].trace)):
        assert [np.asarray(x.data).tobytes() for x in new["c"].addressable_shards] == [
            old["c"].tobytes()
        ] * 2
