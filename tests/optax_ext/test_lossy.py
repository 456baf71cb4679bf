"""Lossy codecs without and with feedback of their rounding: with it, nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import run


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
    """The loss at the end as a share of the first, averaged over steps because it is noisy."""
    losses = regression(tx, rate)
    return losses[-50:].mean() / losses[0]


quantized = functools.partial(optax_ext.published.quantized_topk, density=0.05, axis="w")


@pytest.mark.slow
def test_two_bits_converge_where_nobody_keeps_their_error():
    """SparCML's Algorithm 1; with feedback the errors, larger than most values, add up."""
    selector = sc.select.bucketed(density=0.05, bucket=512)
    exact = ended(optax_ext.published.topk_dsa(0.05, axis="w", selector=selector))
    assert exact < 1e-3
    # Noise of two bits: three times the loss, at a step as large as the exact one takes.
    assert ended(quantized(bits=2)) < 4 * exact
    with_feedback = quantized(bits=2, feedback=True)
    assert ended(quantized(bits=2), 100.0) < 0.02 < 1 < ended(with_feedback, 100.0)
    assert ended(quantized()) < 1.2 * exact


@pytest.mark.slow
def test_quantized_topk_residual_is_what_was_not_selected():
    """With feedback it also includes the rounding error, and then nothing is lost."""
    gradients = np.random.default_rng(1).standard_t(3, (4, 600)).astype(np.float32)
    selector = sc.select.bucketed(density=0.1, bucket=512)
    chosen = selector.select(jnp.asarray(gradients[0]), selector.init(600))[0].indices

    def of(**options):
        found = run(quantized(density=0.1, bits=2, **options), gradients[None])
        return found.updates[0].astype(np.float64), found.residuals[0].astype(np.float64)

    update, kept = of()
    expected = gradients[0].copy()
    expected[np.asarray(chosen)] = 0
    np.testing.assert_array_equal(kept[0], expected)
    assert np.abs(4 * update[0] + kept.sum(axis=0) - gradients.sum(axis=0)).max() > 0.1
    update, kept = of(feedback=True)
    np.testing.assert_allclose(4 * update[0] + kept.sum(axis=0), gradients.sum(axis=0), atol=1e-5)
