"""Gradients that are the same on all workers are found by their bits, where nothing else tells."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import LOOPS, fails_in_the_step, in_loop, mesh, normal, slow_but

WORKERS, SIZE = 4, 10
MESSAGE = "all workers have the same gradients"


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


PARAMS = {"w": jnp.ones((SIZE,)), "b": jnp.zeros(())}


def batch():
    return normal((WORKERS, 3, SIZE))


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


def run(loop, averages):
    return in_loop(loop, local_step(averages), WORKERS)(PARAMS, batch())


def checked(gradients):
    """The gradients behind the check, in a simulation."""
    tx = optax_ext.assert_local_gradients(axis="w")
    workers = jax.tree.leaves(gradients)[0].shape[0]
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=workers)
    return step(gradients)


@pytest.mark.parametrize("loop", slow_but(["check_vma=False"], LOOPS))
def test_averaged_gradients_are_an_error(loop):
    fails_in_the_step(lambda: run(loop, True), MESSAGE)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_local_gradients_pass_unchanged(loop):
    updates = run(loop, False)
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
    step = jax.shard_map(
        lambda p, b: tx.update(jax.grad(loss_fn)(p, b[0]), tx.init(p))[0],
        mesh=mesh(8, "w"),
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
    np.testing.assert_array_equal(checked(gradients), gradients)
    jax.effects_barrier()


def test_the_same_entries_in_another_leaf_are_other_gradients():
    gradients = np.eye(2, dtype=np.float32)
    checked({"a": gradients[:, 0], "b": gradients[:, 1]})
    jax.effects_barrier()
    ones = np.ones(2, np.float32)
    fails_in_the_step(lambda: checked({"a": ones, "b": 0 * ones}), MESSAGE)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_one_entry_that_is_not_zero_is_enough(dtype):
    gradients = np.zeros((WORKERS, SIZE), dtype)
    gradients[:, 3] = -1e-7
    fails_in_the_step(lambda: checked(gradients), MESSAGE)


def test_an_axis_that_is_not_bound():
    tx = optax_ext.assert_local_gradients(axis="w")
    with pytest.raises(ValueError, match="axis='w' is not bound"):
        tx.update(PARAMS, tx.init(PARAMS))
