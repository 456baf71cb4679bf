"""A loop of steps that exchange every H: what its loss is, and what it says of its parameters."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext

WORKERS = 4
MESH = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
PARAMS = {"w": np.full((6, 3), 0.1, np.float32)}
X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
INNER = optax.sgd(0.1)
OPTIMIZERS = {
    "every": (optax_ext.sparse_sgd(0.1, density=0.5, every=3, axis="data"), "after 3, 6, ... "),
    "local steps": (
        optax_ext.published.diloco(INNER, every=3, axis="data"),
        "at the end of a round",
    ),
    "each": (optax_ext.sparse_sgd(0.1, density=0.5, axis="data"), None),
}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - x[:, :3]) ** 2)


def trained(name, steps, **options):
    tx, _ = OPTIMIZERS[name]
    params, state = jax.tree.map(jnp.array, PARAMS), optax_ext.init_state(tx, PARAMS, MESH)
    step = optax_ext.make_train_step(options.pop("loss_fn", loss_fn), tx, MESH, **options)
    for _ in range(steps):
        params, state, *results = step(params, state, X)
    return params, state, results


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loss_is_a_number_that_can_be_printed(name):
    _, _, (loss,) = trained(name, 1)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(float(loss_fn(PARAMS, X)), rel=1e-6)
    assert f"{loss:.2f}" == f"{float(loss_fn(PARAMS, X)):.2f}"


def test_the_loss_and_aux_are_means_over_workers_that_are_apart():
    losses = []

    def with_aux(params, x):
        return loss_fn(params, x), {"loss": loss_fn(params, x), "rows": x.shape[0]}

    for steps in (1, 2):
        _, _, (loss, aux) = trained("every", steps, loss_fn=with_aux, has_aux=True)
        assert float(aux["loss"]) == pytest.approx(float(loss), rel=1e-6)
        assert float(aux["rows"]) == 2
        losses.append(float(loss))
    # The parameters have not changed yet, and the workers have.
    assert losses[1] < losses[0]
    np.testing.assert_array_equal(trained("every", 2)[0]["w"], PARAMS["w"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_log_says_once_when_parameters_change(name, caplog):
    with caplog.at_level(logging.WARNING, "optax_ext"):
        params, state, _ = trained(name, 4)
    said = [x.getMessage() for x in caplog.records if "params change" in x.getMessage()]
    text = OPTIMIZERS[name][1]
    assert len(said) == (text is not None)
    assert all(text in x for x in said)


def test_the_parameters_of_a_flush_have_the_steps_since_the_exchange():
    params, state, (loss,) = trained("every", 5)
    there, _ = optax_ext.flush(params, state)
    now, then = (float(loss_fn(jax.device_get(x), X)) for x in (there, params))
    assert now < then
    # The state and the parameters of the loop are as they were.
    assert np.isfinite(float(loss_fn(params, X)))
