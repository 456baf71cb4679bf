"""Lossy codecs: the rounding of a step comes with a later one, or nobody keeps it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc

WORKERS, SIZE, STEPS = 3, 300, 8


def test_what_a_codec_loses_is_in_the_residuals():
    transformation = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.1),
        sc.allreduce.ok_topk(
            density=0.1,
            slack=float("inf"),  # no balancing: half of the time to compile
            schedule="all_to_all",
            codec=sc.wire.narrow8(block=8, escapes=0.0),
        ),
        axis="w",
    )

    def train(gradients):
        def step(state, gradient):
            update, state = transformation.update(gradient, state)
            return state, (update, state.residual[0])

        return jax.lax.scan(step, transformation.init(gradients[0]), gradients)[1]

    rng = np.random.default_rng(0)
    gradients = rng.standard_t(3, (WORKERS, STEPS, SIZE)).astype(np.float32)
    updates, residuals = sc.simulate(train, axis="w", axis_size=WORKERS)(jnp.asarray(gradients))
    updates, residuals = np.asarray(updates, np.float64), np.asarray(residuals, np.float64)
    np.testing.assert_array_equal(updates, np.broadcast_to(updates[:1], updates.shape))
    given = np.cumsum(gradients.astype(np.float64).sum(axis=0), axis=0)
    applied = np.cumsum(WORKERS * updates[0], axis=0)
    np.testing.assert_allclose(applied + residuals.sum(axis=0), given, atol=2e-5)
    assert np.abs(residuals).max() < 20


def regression(tx, rate, steps=300, size=400, rows=128):
    """Losses of a linear regression by four workers, each with rows of its own."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, rows, size)).astype(np.float32) / np.sqrt(size).astype(np.float32)
    y = x @ rng.standard_normal(size).astype(np.float32)

    def train(x, y):
        def step(carry, _):
            w, state = carry
            error = x @ w - y
            update, state = tx.update(x.T @ error / rows, state)
            return (w - rate * update, state), 0.5 * jnp.mean(error**2)

        w = jnp.zeros(size)
        return jax.lax.scan(step, (w, tx.init(w)), None, length=steps)[1]

    losses = sc.simulate(train, axis="w", axis_size=4)(jnp.asarray(x), jnp.asarray(y))
    return np.asarray(losses, np.float64).mean(axis=0)


def ended(tx, rate=50.0):
    """The loss at the end as a share of the first, over some steps, for it is noisy."""
    losses = regression(tx, rate)
    return losses[-50:].mean() / losses[0]


def quantized(**options):
    return optax_ext.quantized_topk(0.05, axis="w", **options)


@pytest.mark.slow
def test_two_bits_converge_where_nobody_keeps_their_error():
    """SparCML's Algorithm 1; with feedback the errors, larger than most values, add up."""
    selector = sc.select.bucketed(density=0.05, bucket=512)
    exact = ended(optax_ext.topk_dsa(0.05, axis="w", selector=selector))
    assert exact < 1e-3
    # Noise of two bits: three times the loss, at a step as large as the exact one takes.
    assert ended(quantized(bits=2)) < 4 * exact
    assert (
        ended(quantized(bits=2), 100.0) < 0.02 < 1 < ended(quantized(bits=2, feedback=True), 100.0)
    )
    assert ended(quantized()) < 1.2 * exact


@pytest.mark.slow
def test_the_residual_of_quantized_topk_is_what_was_not_selected():
    """With the feedback it also has the rounding, and then nothing is lost."""
    gradients = np.random.default_rng(1).standard_t(3, (4, 600)).astype(np.float32)
    selector = sc.select.bucketed(density=0.1, bucket=512)
    chosen = selector.select(jnp.asarray(gradients[0]), selector.init(600))[0].indices

    def step(tx):
        def one(gradient):
            state = tx.init(gradient)
            update, state = tx.update(gradient, state)
            return update, state.residual[0]

        return sc.simulate(one, axis="w", axis_size=4)(jnp.asarray(gradients))

    def of(**options):
        tx = optax_ext.quantized_topk(0.1, axis="w", slack=float("inf"), bits=2, **options)
        return (np.asarray(x, np.float64) for x in step(tx))

    update, kept = of()
    expected = gradients[0].copy()
    expected[np.asarray(chosen)] = 0
    np.testing.assert_array_equal(kept[0], expected)
    assert np.abs(4 * update[0] + kept.sum(axis=0) - gradients.sum(axis=0)).max() > 0.1
    update, kept = of(feedback=True)
    np.testing.assert_allclose(4 * update[0] + kept.sum(axis=0), gradients.sum(axis=0), atol=1e-5)
