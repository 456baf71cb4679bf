"""A scaling on each worker before a sparse exchange: what it equals, rounds, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import flat, mesh, normal, refused, slow, slow_but, train

PARAMS = {"b": np.zeros(12, np.float32), "w": normal((16, 12), 3)}
BATCHES = [normal((32, 16), seed) for seed in range(60)]


def loss_fn(params, x):
    y = x @ normal((16, 12), 100) + 1
    return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)


def losses(tx, steps=60):
    found = train(tx, loss_fn, PARAMS, BATCHES[:steps], mesh())
    return np.array([float(loss) for _, _, loss in found[1:]]), found[-1][0]


def sparse(scaling, rate=0.05, **options):
    return optax_ext.sparse_optimizer(scaling, rate, axis="data", **{"density": 0.2, **options})


@pytest.mark.parametrize("moments", ["entries", slow("factors")])
def test_sparse_adamw_is_a_case_of_it(moments):
    scaling = optax_ext.scale_by_local_adam(moments=moments)
    one = losses(sparse(scaling, weight_decay=0.1), 8)[1]
    other = optax_ext.sparse_adamw(
        0.05, density=0.2, axis="data", weight_decay=0.1, moments=moments
    )
    np.testing.assert_allclose(flat(one), flat(losses(other, 8)[1]), rtol=1e-5, atol=1e-6)


def test_sparse_sgd_is_a_case_of_it():
    one = losses(sparse(optax.identity(), gain=1.0, limit=None), 8)[1]
    other = losses(optax_ext.sparse_sgd(0.05, density=0.2, axis="data"), 8)[1]
    np.testing.assert_allclose(flat(one), flat(other), rtol=1e-5, atol=1e-6)


SCALINGS = {
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "yogi": optax.scale_by_yogi(b1=0.0),
    "rms": optax.scale_by_rms(decay=0.99, eps=1e-8),
    "amsgrad": optax.scale_by_amsgrad(b1=0.0),
}


@pytest.mark.parametrize("name", slow_but(["factored"], SCALINGS))
def test_a_scaling_by_second_moments_trains(name):
    found, _ = losses(sparse(SCALINGS[name]))
    assert found[-1] < 0.2 * found[0]


MUON = optax.chain(optax.contrib.muon(1.0), optax.scale(-1.0))


@pytest.mark.parametrize("scaling", [MUON, slow(optax.scale_by_lion()), slow(optax.trace(0.9))])
def test_in_rounds_any_scaling_trains_with_its_momentum(scaling):
    found, _ = losses(sparse(scaling, every=4))
    assert found[-4:].min() < 0.5 * found[0]


def test_options_are_injected_and_extra_arguments_arrive():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append(value)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.inject_hyperparams(optax_ext.sparse_optimizer, static_args=("scaling", "density"))(
        spy, learning_rate=0.1, axis="data", density=0.2, gain=1.0, residual=optax_ext.residual()
    )

    def step(gradient):
        state = tx.init(gradient)
        return tx.update(gradient, state, gradient, value=1.0)[0]

    made = jax.make_jaxpr(step, axis_env=[("data", 4)])(jnp.ones(8))
    assert made.out_avals[0].shape == (8,)
    assert seen == [1.0]


def test_what_is_no_scaling_is_refused():
    for wrong in (0.1, optax.scale_by_rms, None):
        refused("scaling must be an optax transformation, got", sparse, wrong, error=TypeError)
    refused("gain must be greater than 0", sparse, optax.identity(), gain=0.0)
    refused("limit must be", sparse, optax.identity(), limit=-1.0)
    refused("density", sparse, optax.identity(), density=0.0)


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.adam(0.1), optax.contrib.muon(1.0), optax.lion(0.1), optax.rmsprop(0.1)],
)
def test_a_complete_optimizer_is_no_scaling(optimizer):
    for every in (None, 10):
        make = functools.partial(optax_ext.sparse_optimizer, axis="data", every=every)
        refused("complete optimizer.*would climb.*optax.scale", make, optimizer, 0.1)
        make(optax.chain(optimizer, optax.scale(-1.0)), 0.1)
