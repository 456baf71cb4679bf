"""Gradients that are the same on all workers are found by their bits, where nothing else tells."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests import jax_internals

WORKERS, SIZE = 4, 10
MESSAGE = "all workers have the same gradients"


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


PARAMS = {"w": jnp.ones((SIZE,)), "b": jnp.zeros(())}


def batch():
    return np.random.default_rng(0).standard_normal((WORKERS, 3, SIZE)).astype(np.float32)


def transformation():
    return optax.chain(
        optax_ext.assert_local_gradients(axis="w"), optax_ext.topk_a(0.5, axis="w"), optax.sgd(0.1)
    )


def local_step(averages):
    tx = transformation()

    def step(params, batch):
        if averages:
            # Of one batch; of the parameters nothing here says that all have the same.
            batch = jax.lax.pmean(batch, "w")
        gradients = jax.grad(loss_fn)(params, batch)
        return tx.update(gradients, tx.init(params), params)[0]

    return step


def in_pmap(averages):
    devices = jax.devices()[:WORKERS]
    step = jax.pmap(local_step(averages), axis_name="w", devices=devices, in_axes=(None, 0))
    return lambda: step(PARAMS, batch())


def in_shard_map(averages):
    mesh = jax.make_mesh(
        (WORKERS,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:WORKERS]
    )
    step = jax.shard_map(
        lambda params, batch: local_step(averages)(params, batch[0]),
        mesh=mesh,
        in_specs=(P(), P("w")),
        out_specs=P(),
        check_vma=False,
    )
    return lambda: jax.jit(step)(PARAMS, batch())


def in_simulation(averages):
    step = sc.simulate(local_step(averages), axis="w", axis_size=WORKERS, in_axes=(None, 0))
    return lambda: step(PARAMS, batch())


MODES = pytest.mark.parametrize(
    "mode", [in_pmap, in_shard_map, in_simulation], ids=["pmap", "check_vma=False", "simulate"]
)


def is_an_error(step):
    try:
        with pytest.raises(Exception, match=MESSAGE):  # noqa: B017, PT012
            jax.block_until_ready(step())
            jax.effects_barrier()
    finally:
        # JAX would report the failed callback again when the process ends.
        jax_internals.forget_failed_callbacks()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(in_pmap, marks=pytest.mark.slow),
        in_shard_map,
        pytest.param(in_simulation, marks=pytest.mark.slow),
    ],
    ids=["pmap", "check_vma=False", "simulate"],
)
def test_averaged_gradients_are_an_error(mode):
    is_an_error(mode(True))


@pytest.mark.slow
@MODES
def test_local_gradients_pass_unchanged(mode):
    updates = mode(False)()
    jax.block_until_ready(updates)
    jax.effects_barrier()
    gradients = [jax.grad(loss_fn)(PARAMS, part) for part in batch()]
    expected = optax_ext.topk_a(0.5, axis="w")
    flat = jax.tree.map(lambda *x: jnp.stack(x), *gradients)
    sparse = sc.simulate(
        lambda g: expected.update(g, expected.init(g))[0], axis="w", axis_size=WORKERS
    )(flat)
    for name, leaf in updates.items():
        wanted = -0.1 * sparse[name][0]
        # A leading axis in pmap and in simulation.
        got = np.asarray(leaf).reshape(-1, *wanted.shape)[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_under_types_it_is_an_error_at_trace_time():
    tx = optax_ext.assert_local_gradients(axis="w")
    mesh = jax.make_mesh((8,), ("w",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        lambda p, b: tx.update(jax.grad(loss_fn)(p, b[0]), tx.init(p))[0],
        mesh=mesh,
        in_specs=(P(), P("w")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"updates\['b'\] is the same on every worker.*"):
        jax.eval_shape(step, PARAMS, jnp.ones((8, 3, SIZE)))


@pytest.mark.parametrize(
    "gradients",
    [
        np.zeros((WORKERS, SIZE), np.float32),  # no evidence
        np.ones((1, SIZE), np.float32),  # one worker
        np.eye(WORKERS, SIZE, dtype=np.float32),
        np.full((WORKERS, SIZE), np.nan, np.float32),  # a run that diverges
        # All have the same magnitudes.
        np.sign(np.random.default_rng(0).standard_normal((WORKERS, SIZE))).astype(np.float16),
        # All but one agree, also with the first.
        np.concatenate([np.ones((WORKERS - 1, SIZE)), np.full((1, SIZE), 1.5)]).astype(np.float32),
        np.concatenate([np.full((1, SIZE), 1.5), np.ones((WORKERS - 1, SIZE))]).astype(np.float32),
    ],
    ids=["zero", "one worker", "disjoint", "NaN", "signs", "all but the last", "all but the first"],
)
def test_what_is_no_error(gradients):
    tx = optax_ext.assert_local_gradients(axis="w")
    step = sc.simulate(
        lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=gradients.shape[0]
    )
    np.testing.assert_array_equal(step(gradients), gradients)
    jax.effects_barrier()


def test_the_same_entries_in_another_leaf_are_other_gradients():
    tx = optax_ext.assert_local_gradients(axis="w")
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2)
    gradients = np.eye(2, dtype=np.float32)
    step({"a": gradients[:, 0], "b": gradients[:, 1]})
    jax.effects_barrier()
    ones = np.ones(2, np.float32)
    is_an_error(lambda: step({"a": ones, "b": 0 * ones}))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_one_entry_that_is_not_zero_is_enough(dtype):
    gradients = np.zeros((WORKERS, SIZE), dtype)
    gradients[:, 3] = -1e-7
    tx = optax_ext.assert_local_gradients(axis="w")
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=WORKERS)
    is_an_error(lambda: step(gradients))


def test_an_axis_that_is_not_bound():
    tx = optax_ext.assert_local_gradients(axis="w")
    with pytest.raises(ValueError, match="axis='w' is not bound"):
        tx.update(PARAMS, tx.init(PARAMS))
