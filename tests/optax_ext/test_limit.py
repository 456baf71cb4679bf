"""A limit of what an entry moves in a step: most of what is beyond it stays in the residuals."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import run, slow

MINUS = optax.scale(-1.0)


def limited(limit, density=1.0, **options):
    return optax_ext.topk_a(density, axis="w", local=MINUS, limit=limit, **options)


@pytest.mark.parametrize("limit", [2.0, lambda count: 2.0 / jnp.float32(1 + count)])
def test_what_is_beyond_comes_later(limit):
    given = np.zeros((4, 2, 2), np.float32)
    given[0] = [[-10.0, 1.0], [0.0, 3.0]]
    updates = run(limited(limit), given).updates[:, 0]
    of_number = [[2.75, -2.0], [2.0625, 0.0], [0.1875, 0.0], [0.0, 0.0]]
    of_schedule = [[2.75, -2.0], [1.3125, 0.0], [0.734375, 0.0], [0.203125, 0.0]]
    np.testing.assert_allclose(updates, of_schedule if callable(limit) else of_number, rtol=1e-6)


def test_dense_steps_have_no_limit():
    given = np.float32([[[4.0, 1.0], [2.0, 3.0]]])
    updates = run(limited(1e-3, 0.5, dense_steps=1), given).updates
    assert updates[0].tolist() == [[-3.0, -2.0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_what_is_not_finite_goes_as_without_a_limit(policy):
    given = np.float32([[[np.inf, 0.5, np.nan], [1.0, 0.25, 1.0]]])
    with_one, without = (run(limited(x, nonfinite=policy), given) for x in (1.0, None))
    np.testing.assert_array_equal(with_one.updates, without.updates)
    np.testing.assert_array_equal(with_one.residuals, without.residuals)


@pytest.mark.parametrize(("density", "rates"), [slow(0.5, 2.0), (0.05, 2.0), (0.025, 4.0)])
def test_the_default_limit_is_a_tenth_of_the_wait(density, rates):
    """An entry moves by so many rates, and by a quarter of what is beyond."""
    rate, size = 0.125, 40
    tx = optax_ext.sparse_adamw(rate, density=density, axis="w", weight_decay=0.0)

    def worker(zeros):
        state = tx.init(zeros)
        # More than any limit waits at every entry, of this worker alone.
        return tx.update(zeros, state._replace(residual=state.residual + 100.0))[0]

    moved = sc.simulate(worker, axis="w", axis_size=1)(jnp.zeros((1, size)))
    assert np.max(moved) == np.float32((100.0 + 3 * rates * rate) / 4)


RATE = 1e-3


def trained(gradients, density):
    """Parameters and what the workers wait for in the mean, ``f64[steps, n]``, in rates."""
    tx = optax_ext.sparse_adamw(RATE, density=density, axis="w", weight_decay=0.0)
    found = run(tx, gradients.astype(np.float32))
    moved, waits = found.updates[:, 0].astype(np.float64), found.residuals.astype(np.float64)
    return moved.cumsum(0) / RATE, waits.mean(1) / RATE


# A density, and for how many steps an entry waits for its turn then at most: half of the entries
# are steady, and so large that they take most of the slots.
@pytest.mark.parametrize(("density", "wait"), [(0.05, 20), (0.02, 50)])
def test_updates_of_one_sign_do_not_pile_up(density, wait):
    """Half of the entries have one gradient at all steps, and the sign of all changes midway."""
    workers, size, steps = 8, 2_048, 12 * wait
    rng = np.random.default_rng(0)
    sign = np.where(np.arange(steps) < steps // 2, 1.0, -1.0)
    gradients = rng.standard_normal((steps, workers, size))
    steady = np.arange(size) % 2 == 0
    gradients[:, :, steady] = sign[:, None, None]
    params, waits = trained(gradients, density)
    gain = min(2.0, (workers / 2) ** 0.5)
    # The steady half takes the slots, so that each of it is delivered every wait / 2 steps. Three
    # times what arrives meanwhile may stay, and as much arrives before the next delivery.
    bound = 4 * gain * wait / 2
    assert (np.abs(waits[:, steady]) <= bound).all()
    half = steps // 2
    moved = -params[half - 1, steady]
    assert (moved >= gain * half - bound).all()
    # The parameters turn round within a wait or two, and not after as long as they went on.
    turned = np.argmin(params[:, steady], axis=0)
    assert (turned <= half + 2 * wait).all()


def test_noise_beside_many_steady_entries_moves():
    """An entry waits until its residual has grown to the size of theirs, which is bounded.

    80 learning rates at most, as above: a walk of steps of 2 is there after some 1,600.
    """
    gradients = np.random.default_rng(0).standard_normal((1_600, 8, 512))
    gradients[:, :, ::2] = 1.0
    params, _ = trained(gradients, 0.05)
    assert (params[-1] == 0).mean() <= 0.01


@pytest.mark.parametrize("limit", [0.5, 2.0, 8.0])
def test_no_more_waits_than_three_times_the_most_that_arrived_between_two_deliveries(limit):
    """The bound that is documented, for one entry that is delivered at every step."""
    rng = np.random.default_rng(1)
    arrived = rng.exponential(6.0, 200).astype(np.float32)
    found = run(limited(limit), -arrived[:, None, None])
    updates, kept = found.updates[:, 0, 0], found.residuals[:, 0, 0]
    assert (kept <= 3 * np.maximum.accumulate(arrived)).all()
    assert kept.max() > 0
    np.testing.assert_allclose(updates.sum() + kept[-1], arrived.sum(), rtol=1e-5)
