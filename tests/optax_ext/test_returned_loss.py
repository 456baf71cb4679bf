"""The loss that a step returns is evaluated where its gradients are taken: docs/sharp-bits.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from sklearn.datasets import load_digits

import optax_ext

pytestmark = pytest.mark.usefixtures("default_promotion")

STEPS = 20


def loss_fn(params, batch):
    x, y = batch
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def gaps(tx):
    """How far the loss of each step is from that of the parameters that were given to it."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss_fn, tx, mesh, donate=False)
    at_params = jax.jit(loss_fn)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        rows = rng.choice(1400, 128, replace=False)
        batch = (images[rows], labels[rows])
        before = float(at_params(params, batch))
        params, state, loss = step(params, state, batch)
        found.append(float(loss) / before - 1)
    return found


def test_of_a_dense_step_it_is_that_of_the_parameters():
    found = gaps(optax.chain(optax_ext.dense(axis="data"), optax.adamw(1e-2)))
    np.testing.assert_allclose(found, 0, atol=1e-5)


@pytest.mark.parametrize("limit", ["auto", None])
def test_of_sparse_adamw_it_is_lower(limit):
    found = gaps(optax_ext.sparse_adamw(1e-2, axis="data", limit=limit))
    # Nothing waits before the first step.
    assert found[0] == pytest.approx(0, abs=1e-5)
    assert max(found[1:]) < 0
    # The page says 4 and 2 %; how much waits depends on the limit's rule.
    assert -0.1 < np.mean(found) < -0.01
