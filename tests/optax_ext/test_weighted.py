"""Workers with unequal numbers of examples train as one device does with the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import refused

WORKERS = 4
MESH = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
PARAMS = {"w": np.full((6, 3), 0.1, np.float32)}
X = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)
MASKS = {
    "all": np.ones(16),
    "unequal": (np.arange(16) < 7).astype(int),
    "one worker": np.eye(1, 16)[0],
    "weights": np.linspace(0, 2, 16),
}
DENSE = optax.chain(optax_ext.dense(axis="data"), optax.sgd(0.1))


def mean(params, batch):
    x, mask = batch
    losses = jnp.mean((x @ params["w"] - x[:, :3]) ** 2, axis=1)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def weighted(params, batch):
    return mean(params, batch), batch[1].sum()


def with_aux(params, batch):
    x, mask = batch
    aux = {"first": jnp.sum(x[:, 0] * mask) / jnp.sum(mask), "rows": mask.shape[0]}
    return weighted(params, batch), aux


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_weighted_step_is_the_step_of_one_device_with_the_whole_batch(mask, has_aux):
    batch = X, MASKS[mask].astype(np.float32)
    loss_fn = with_aux if has_aux else weighted
    step = optax_ext.make_train_step(
        loss_fn, DENSE, MESH, weighted=True, has_aux=has_aux, donate=False
    )
    state = optax_ext.init_state(DENSE, PARAMS, MESH)
    params, _, loss, *aux = step(PARAMS, state, batch)
    expected, gradient = jax.value_and_grad(mean)(PARAMS, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    found = (PARAMS["w"] - np.asarray(params["w"])) / 0.1
    np.testing.assert_allclose(found, gradient["w"], rtol=1e-5, atol=1e-7)
    if has_aux:
        ((of_all, aux),) = [(with_aux(PARAMS, batch)[1], *aux)]
        assert float(aux["first"]) == pytest.approx(float(of_all["first"]), rel=1e-5)
        assert int(aux["rows"]) == 4


def test_a_padded_batch_is_trained_with_where_some_workers_have_no_example():
    tx = optax_ext.sparse_adamw(1e-2, axis="data")
    batch = X, MASKS["unequal"].astype(np.float32)
    losses = {}
    for name, options in {"mean": {}, "weighted": {"weighted": True}}.items():
        params, state = jax.tree.map(jnp.array, PARAMS), optax_ext.init_state(tx, PARAMS, MESH)
        step = optax_ext.make_train_step(weighted if options else mean, tx, MESH, **options)
        for _ in range(5):
            params, state, _ = step(params, state, batch)
        losses[name] = float(mean(jax.device_get(params), batch))
        assert int(optax_ext.get_state(state).skipped) == (0 if options else 5)
    assert losses["weighted"] < losses["mean"] == float(mean(PARAMS, batch))


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_without_weights_that_count_a_step_is_skipped(weight):
    tx = optax_ext.sparse_sgd(0.1, density=0.5, axis="data")
    step = optax_ext.make_train_step(
        lambda p, b: (jnp.mean(b[0] @ p["w"]), b[1].sum()), tx, MESH, weighted=True, donate=False
    )
    mask = np.zeros(16, np.float32)
    mask[5] = weight
    state = optax_ext.init_state(tx, PARAMS, MESH)
    params, state, loss = step(PARAMS, state, (X, mask))
    assert np.isnan(loss)
    assert int(optax_ext.get_state(state).skipped) == 1
    np.testing.assert_array_equal(params["w"], PARAMS["w"])


WRONG = [
    (mean, {}, TypeError, r"must return \(loss, weight\), as weighted=True says"),
    (mean, {"has_aux": True}, TypeError, r"must return \(\(loss, weight\), aux\)"),
    (lambda p, b: (mean(p, b), b[1]), {}, TypeError, r"the scalar that they count"),
    (weighted, {"every": 2}, ValueError, "weighted=True adds up the weights of all workers"),
]


@pytest.mark.parametrize(("loss_fn", "options", "kind", "message"), WRONG, ids=range(4))
def test_what_has_no_weights_is_refused(loss_fn, options, kind, message):
    tx = optax_ext.sparse_sgd(0.1, density=0.5, axis="data", every=options.pop("every", None))
    step = optax_ext.make_train_step(loss_fn, tx, MESH, weighted=True, donate=False, **options)
    state = optax_ext.init_state(tx, PARAMS, MESH)
    refused(message, step, PARAMS, state, (X, np.ones(16, np.float32)), error=kind)


def test_a_sum_divided_by_the_mean_count_is_the_same_in_a_step_of_ones_own():
    """The recipe of docs/troubleshooting.md."""
    batch = X, MASKS["unequal"].astype(np.float32)

    def loss_fn(params, batch):
        x, mask = batch
        losses = jnp.mean((x @ params["w"] - x[:, :3]) ** 2, axis=1)
        return jnp.sum(losses * mask) / jax.lax.pmean(jnp.sum(mask), "data")

    @optax_ext.data_parallel
    def own(params, state, batch):
        there = optax_ext.ahead(params, state)
        loss, gradients = jax.value_and_grad(loss_fn)(there, batch)
        updates, state = DENSE.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    made = optax_ext.make_train_step(loss_fn, DENSE, MESH, donate=False)
    expected, gradient = jax.value_and_grad(mean)(PARAMS, batch)
    state = optax_ext.init_state(DENSE, PARAMS, MESH)
    for step in (own, made):
        params, _, loss = step(PARAMS, state, batch)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        found = (PARAMS["w"] - np.asarray(params["w"])) / 0.1
        np.testing.assert_allclose(found, gradient["w"], rtol=1e-5, atol=1e-7)
