"""Ok-Topk as it is published: Algorithm 1 over many steps, with tau and tau'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives import _volumes
from tests.reference.ok_topk import Published

WORKERS, SIZE, DENSITY, K, STEPS = 4, 300, 0.05, 15, 20
TAU, TAU_PRIME = 6, 4


def gradients(workers=WORKERS):
    """Multiples of 2**-10 that grow and shrink, and gather where a region was: exact sums."""
    rng = np.random.default_rng(0)
    shape = (STEPS, workers, SIZE)
    x = rng.standard_t(3, shape) * (1 + np.sin(np.arange(STEPS)))[:, None, None]
    # Large sums lie in one region, which the workers' own selections don't show.
    x[STEPS // 2 :, :, : SIZE // 10] *= 6
    return (np.round(x * 2**10) / 2**10).astype(np.float32)


@functools.cache
def run(workers=WORKERS, paper=True, **options):
    options = {"repartition_period": TAU, "global_period": TAU_PRIME, **options}
    tx = optax_ext.ok_topk(DENSITY, axis="w", paper=paper, **options)

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            found = state.residual[0], state.info, state.allreduce.boundaries
            return state, (updates, found)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    simulated = sc.simulate(train, axis="w", axis_size=workers, in_axes=1, out_axes=1)
    return jax.tree.map(np.asarray, simulated(jnp.asarray(gradients(workers))))


def agreed_words(t, workers):
    """What is told besides entries: the boundaries, and three counts of each worker."""
    boundaries = _volumes.all_reduce(2 * (workers - 1), workers) * (t % TAU == 0)
    return boundaries + _volumes.all_gather(3, workers)


@pytest.mark.parametrize("paper", [True, "corrected"])
@pytest.mark.parametrize("workers", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_step_is_that_of_the_paper(workers, paper):
    oracle = Published(workers, SIZE, K, TAU_PRIME, TAU, corrected=paper == "corrected")
    updates, (residuals, info, boundaries) = run(workers, paper, slack=float("inf"))
    steps = []
    for t, given in enumerate(gradients(workers)):
        step = oracle.step(given)
        np.testing.assert_array_equal(workers * updates[t, 0].astype(np.float64), step.total)
        np.testing.assert_array_equal(residuals[t], oracle.residuals)
        assert info.selected[t, :, 0].tolist() == step.selected
        assert (info.delivered[t] == step.delivered).all()
        words = np.add(step.words, agreed_words(t, workers))
        np.testing.assert_allclose(info.useful[t, :, 0], words, rtol=1e-6)
        steps.append(step)
    assert not info.overflow.any()
    # In between the counts are not k, less so where they correct the thresholds.
    whole = [step.delivered for step in steps]
    assert set(np.ravel([step.selected for step in steps[::TAU_PRIME]])) == {K}
    assert set(whole[::TAU_PRIME]) == {K}
    assert max(whole) > 1.5 * K
    assert min(whole) < 0.75 * K
    print([(step.owned, step.held) for step in steps])
    # The regions are cut anew every tau steps and at no other.
    boundaries = boundaries[:, 0]
    changes = [t for t in range(1, STEPS) if (boundaries[t] != boundaries[t - 1]).any()]
    assert changes == list(range(TAU, STEPS, TAU))
