"""In rounds a worker leaves out a step that is not finite, and its schedules go on."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from tests.optax_ext.helpers import mesh, normal, run, train

# optax mixes dtypes in some of these states.
pytestmark = pytest.mark.usefixtures("default_promotion")
SIZE, WORKERS = 40, 3
GIVEN = normal((6, WORKERS, SIZE))
GIVEN[1, 1, 7], GIVEN[2, 1, 0], GIVEN[4, 2, 3] = np.nan, np.inf, np.nan


def rate(step):
    """It is halved at the fourth step."""
    return 0.1 * 0.5 ** (step >= 3)


HALVED = optax.conditionally_transform(optax.scale(0.5), lambda step: step >= 3)
INNER = {
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
    "masked": optax.masked(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), True),
    "conditionally_transform": optax.chain(optax.sgd(0.1), HALVED),
    "chain": optax.chain(optax.scale(2.0), optax.scale_by_schedule(rate), optax.scale(-0.5)),
}
ON = mesh(WORKERS, "w")
MEAN = optax.chain(optax_ext.dense(axis="w"), optax.sgd(1.0))
AROUND = {
    "local_steps": lambda inner: optax_ext.local_steps(inner, MEAN, every=2),
    "sparse_optimizer": lambda inner: optax_ext.sparse_optimizer(
        optax.chain(inner, optax.scale(-1.0)), 1.0, density=1.0, every=2, axis="w", limit=None
    ),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("around", AROUND)
def test_schedules_of_all_states_go_on(around, inner):
    made = AROUND[around]
    found, expected = run(made(INNER[inner]), GIVEN), run(made(optax.sgd(rate)), GIVEN)
    np.testing.assert_allclose(found.updates, expected.updates, atol=1e-6)
    assert found.states.missed[-1].ravel().tolist() == [0, 2, 1]


def test_the_steps_of_schedule_free_go_on_and_its_averages_do_not():
    inner = optax.contrib.schedule_free_sgd(rate)
    tx = optax_ext.local_steps(inner, MEAN, every=2)
    *_, (_, state, _) = train(tx, lambda w, x: jnp.sum(x * w), np.ones(SIZE, "f4"), GIVEN, ON)
    assert state.inner.step_count.tolist() == [1 + len(GIVEN)] * WORKERS
    first, second, third = state.inner.weight_sum.ravel().tolist()
    assert first > third > second > 0
