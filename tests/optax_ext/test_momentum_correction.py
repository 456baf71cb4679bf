"""Momentum before the residual: that of dense SGD where all is sent, masked where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import normal, run, slow

WORKERS, SIZE, STEPS = 3, 40, 6
GIVEN = normal((STEPS, WORKERS, SIZE))


def top(density, correction):
    return optax_ext.topk_a(density, axis="w", correction=correction)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_where_all_is_sent_it_is_plain_momentum(nesterov):
    tx = top(1.0, optax_ext.momentum_correction(0.9, nesterov=nesterov, masking=False))
    dense = optax.chain(optax_ext.dense(axis="w"), optax.trace(0.9, nesterov))
    updates, expected = (run(each, GIVEN).updates for each in (tx, dense))
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("masking", [False, True])
def test_it_is_the_algorithm_of_dgc(masking):
    found = run(top(0.1, optax_ext.momentum_correction(0.9, masking=masking)), GIVEN)
    u, v = np.zeros((2, WORKERS, SIZE), np.float32)
    for step, gradient in enumerate(GIVEN):
        u = np.float32(0.9) * u + gradient
        v = v + u
        order = np.argsort(-np.abs(v), axis=1)[:, :4]
        sent = np.zeros_like(v)
        np.put_along_axis(sent, order, np.take_along_axis(v, order, 1), 1)
        v = v - sent
        if masking:
            u[sent != 0] = 0
        np.testing.assert_allclose(found.updates[step, 0], sent.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.residuals[step], v, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.state.velocity[step, :, 0], u, rtol=1e-4, atol=1e-5)


# An allreduce that delivers of the three entries that all select one of each worker: where nothing
# is rounded its first, else its own, of which a third is rounded.
@pytest.mark.parametrize(
    "exchange", [slow(sc.allreduce.published.sparse_allgather()), sc.allreduce.topk_a()]
)
def test_only_what_was_delivered_is_masked(exchange):
    """What is rounded off the entries of others is no delivery."""

    def reduce(coo, state, *, axis):
        mine = jnp.arange(coo.capacity) == jax.lax.axis_index(axis)
        part = sc.PaddedCOO(
            jnp.where(mine, coo.values, 0), jnp.where(mine, coo.indices, coo.size), coo.size
        )
        total, undelivered, _, info = exchange.reduce(part, state, axis=axis)
        kept = sc.Undelivered(jnp.where(mine, 0, coo.values), undelivered.others)
        return total, kept, state, info

    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.3),
        exchange._replace(reduce=reduce),
        axis="w",
        correction=optax_ext.momentum_correction(0.9),
    )
    given = np.zeros((1, WORKERS, 10), jnp.bfloat16)
    given[..., [2, 5, 7]] = [1.0, -2.0, 5.0]
    found = run(tx, given)
    assert found.state.info.arrived[0].tolist() == [[1]] * WORKERS
    masked = [np.flatnonzero(v).tolist() for v in found.state.velocity[0, :, 0]]
    assert masked == [[5, 7], [2, 7], [2, 5]]
    total = WORKERS * found.updates[0, 0].astype(np.float64)
    total += found.residuals[0].astype(np.float64).sum(0)
    np.testing.assert_allclose(total, given[0].astype(np.float64).sum(0), rtol=1e-6)


def test_clipping_is_by_the_bound_over_the_root_of_the_workers():
    tx = optax_ext.local_clip_by_global_norm(1.0, axis="w")
    gradient = GIVEN[0] * np.array([[1.0], [1e-3], [1e30]], np.float32)

    def clipped(gradient):
        out = run(tx, {"a": gradient[None, :, :10], "b": gradient[None, :, 10:]}).updates
        return np.concatenate([out["a"][0], out["b"][0]], axis=1)

    out = clipped(gradient)
    norms = np.linalg.norm(out.astype(np.float64), axis=1)
    np.testing.assert_allclose(norms[[0, 2]], 1 / np.sqrt(WORKERS), rtol=1e-5)
    np.testing.assert_array_equal(out[1], gradient[1])
    gradient[0, 3] = np.nan
    assert np.isnan(clipped(gradient)[0]).sum() == 1
