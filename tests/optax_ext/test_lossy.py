"""Error feedback with a lossy codec: the rounding of a step comes with a later one."""

import jax
import jax.numpy as jnp
import numpy as np

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
