"""What a worker accumulates and keeps, by option.

The options are a velocity before the residual, a residual that decays or is bfloat16, and a limit
of an entry's move in a step: most of the excess stays in the residuals.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback import _residual
from tests.optax_ext.helpers import normal, run, slow

WORKERS, SIZE, STEPS = 3, 40, 6
GIVEN = normal((STEPS, WORKERS, SIZE))
BF16 = optax_ext.residual(jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_of_all_entries_is_plain_momentum(nesterov):
    correction = optax_ext.momentum_correction(0.9, nesterov=nesterov, masking=False)
    tx = optax_ext.topk_a(1.0, axis="w", correction=correction)
    dense = optax.chain(optax_ext.dense(axis="w"), optax.trace(0.9, nesterov))
    updates, expected = (run(each, GIVEN).updates for each in (tx, dense))
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction_is_the_algorithm_of_dgc(masking):
    correction = optax_ext.momentum_correction(0.9, masking=masking)
    found = run(optax_ext.topk_a(0.1, axis="w", correction=correction), GIVEN)
    u, v = np.zeros((2, WORKERS, SIZE), np.float32)
    for step, gradient in enumerate(GIVEN):
        u = np.float32(0.9) * u + gradient
        v = v + u
        order = np.argsort(-np.abs(v), axis=1)[:, :4]
        sent = np.zeros_like(v)
        np.put_along_axis(sent, order, np.take_along_axis(v, order, 1), 1)
        v = v - sent
        if masking:
            u[sent != 0] = 0
        np.testing.assert_allclose(found.updates[step, 0], sent.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.residuals[step], v, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.state.velocity[step, :, 0], u, rtol=1e-4, atol=1e-5)


# An allreduce that delivers one entry of each worker out of three that all select: the first if
# nothing is rounded, otherwise its own, of which 1/3 is rounded.
@pytest.mark.parametrize(
    "exchange", [slow(sc.allreduce.published.sparse_allgather()), sc.allreduce.topk_a()]
)
def test_masking_is_of_what_was_delivered_only(exchange):
    """The rounding error of others' entries is not a delivery."""

    def reduce(coo, state, *, axis):
        mine = jnp.arange(coo.capacity) == jax.lax.axis_index(axis)
        part = sc.PaddedCOO(
            jnp.where(mine, coo.values, 0), jnp.where(mine, coo.indices, coo.size), coo.size
        )
        total, undelivered, _, info = exchange.reduce(part, state, axis=axis)
        kept = sc.Undelivered(jnp.where(mine, 0, coo.values), undelivered.others)
        return total, kept, state, info

    tx = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.3),
        exchange._replace(reduce=reduce),
        axis="w",
        correction=optax_ext.momentum_correction(0.9),
    )
    given = np.zeros((1, WORKERS, 10), jnp.bfloat16)
    given[..., [2, 5, 7]] = [1.0, -2.0, 5.0]
    found = run(tx, given)
    assert found.state.info.arrived[0].tolist() == [[1]] * WORKERS
    masked = [np.flatnonzero(v).tolist() for v in found.state.velocity[0, :, 0]]
    assert masked == [[5, 7], [2, 7], [2, 5]]
    total = WORKERS * found.updates[0, 0].astype(np.float64)
    total += found.residuals[0].astype(np.float64).sum(0)
    np.testing.assert_allclose(total, given[0].astype(np.float64).sum(0), rtol=1e-6)


def test_clipping_is_by_the_bound_over_the_root_of_the_workers():
    tx = optax_ext.local_clip_by_global_norm(1.0, axis="w")
    gradient = GIVEN[:2] * np.array([[1.0], [1e-3], [1e30]], np.float32)
    gradient[1, 0, 3] = np.nan
    out = run(tx, {"a": gradient[..., :10], "b": gradient[..., 10:]}).updates
    first, second = np.concatenate([out["a"], out["b"]], axis=2)
    norms = np.linalg.norm(first.astype(np.float64), axis=1)
    np.testing.assert_allclose(norms[[0, 2]], 1 / np.sqrt(WORKERS), rtol=1e-5)
    np.testing.assert_array_equal(first[1], gradient[0, 1])
    assert np.isnan(second[0]).sum() == 1


def test_bfloat16_residual_keeps_what_it_holds_and_stays_finite():
    def store(x):
        return _residual.store(x, BF16, axis="w", count=jnp.int32(0))

    values = np.float32([0, -0.0, 1, -2.5, 3e38, np.inf, -np.inf, np.nan, 1e-40])
    exact = values.astype(jnp.bfloat16).astype(np.float32)
    largest = np.full(1000, np.finfo(np.float32).max)
    quiet = np.uint32([0x7F800001]).view(np.float32)  # a NaN whose payload is in the lower half
    given = np.concatenate([exact, largest, quiet])[None, None]
    kept = np.asarray(sc.simulate(store, axis="w", axis_size=1)(given)[0, 0], np.float32)
    np.testing.assert_array_equal(kept[: len(exact)], exact)
    assert np.isfinite(kept[len(exact) : -1]).all()
    assert np.isnan(kept[-1])


@pytest.mark.slow
def test_small_gradients_add_up_in_bfloat16():
    """Each is 1/1,000 of the residual and would vanish if it were rounded to the nearest."""
    steps, size = 400, 256
    given = np.full((1 + steps, 1, size), 1e-3, np.float32)
    given[0] = 1.0
    # The first entry is always the one that is sent.
    given[..., 0] = 100.0
    found = run(optax_ext.topk_a(1 / size, axis="w", residual=BF16), given)
    rest = found.residuals[-1, 0, 1:].astype(np.float64)
    # 1 + 0.4; the mean of 255 walks whose steps of 2**-7 come with probability 0.128.
    deviation = np.sqrt(steps * 0.128) / 128 / np.sqrt(size)
    assert abs(rest.mean() - 1.4) < 5 * deviation


@pytest.mark.parametrize("exponent", [-66, 40])
def test_bfloat16_rounding_does_not_depend_on_the_size_of_the_gradients(exponent):
    """No number is subnormal at 1e-20: all bits except the exponents are the same as at 1."""
    tx = optax_ext.topk_a(0.1, axis="w", residual=BF16)
    scale = np.float32(2.0**exponent)
    plain, scaled = run(tx, GIVEN), run(tx, GIVEN * scale)
    np.testing.assert_array_equal(scaled.updates, plain.updates * scale)
    residuals, of_scaled = (x.residuals.astype(np.float32) for x in (plain, scaled))
    np.testing.assert_array_equal(of_scaled, residuals * scale)


def test_bfloat16_errors_are_within_their_bound_and_cancel():
    tx = optax_ext.topk_a(0.1, axis="w", residual=BF16)
    rng = np.random.default_rng(1)
    given = (1e-20 * rng.standard_normal((12, WORKERS, 4000))).astype(np.float32)
    found = run(tx, given)
    assert found.residuals.dtype == jnp.bfloat16
    updates, kept = found.updates, found.residuals.astype(np.float64)
    before = np.concatenate([np.zeros((1, *kept.shape[1:])), kept[:-1]])
    missing = WORKERS * updates[:, 0].astype(np.float64) + (kept - before - given).sum(1)
    bound = 2.0**-7 * np.abs(kept).sum(1) + 2.0**-22 * np.abs(before + given).sum(1)
    assert (np.abs(missing) <= bound).all()
    assert (missing != 0).mean() > 0.5
    # A rounding to one of two neighbors, at most 2^-7 of it apart, has at most half of that as its
    # deviation. The bound is six deviations of the sum, since all draws are independent.
    deviation = 2.0**-8 * np.sqrt((kept**2).sum())
    assert abs(missing.sum()) < 6 * deviation


@pytest.mark.parametrize("policy", [slow("skip"), "drop"])
def test_decayed_residual_takes_what_is_finite_after_the_decay(policy):
    how = optax_ext.residual(decay=0.5)
    tx = optax_ext.topk_a(0.5, axis="w", residual=how, nonfinite=policy)
    # Two entries of the first step stay in the residual, and the second step adds to them.
    given = np.full((2, 1, 4), 3e38, np.float32)
    given[1] = 1e38
    found = run(tx, given)
    assert found.last.skipped.tolist() == found.last.dropped.tolist() == [0]
    waited = found.residuals[0, 0].astype(np.float64)
    assert np.count_nonzero(waited) == 2
    total = found.updates[1, 0].astype(np.float64) + found.residuals[1, 0]
    np.testing.assert_allclose(total, 0.5 * waited + 1e38, rtol=1e-6)


MINUS = optax.scale(-1.0)
limited = functools.partial(optax_ext.topk_a, density=1.0, axis="w", local=MINUS)


@pytest.mark.parametrize("limit", [2.0, lambda count: 2.0 / jnp.float32(1 + count)])
@pytest.mark.one_in(2)
def test_limit_lets_what_is_beyond_come_later(limit):
    given = np.zeros((4, 2, 2), np.float32)
    given[0] = [[-10.0, 1.0], [0.0, 3.0]]
    updates = run(limited(limit=limit), given).updates[:, 0]
    of_number = [[2.75, -2.0], [2.0625, 0.0], [0.1875, 0.0], [0.0, 0.0]]
    of_schedule = [[2.75, -2.0], [1.3125, 0.0], [0.734375, 0.0], [0.203125, 0.0]]
    np.testing.assert_allclose(updates, of_schedule if callable(limit) else of_number, rtol=1e-6)


def test_dense_steps_have_no_limit():
    given = np.float32([[[4.0, 1.0], [2.0, 3.0]]])
    updates = run(limited(limit=1e-3, density=0.5, dense_steps=1), given).updates
    assert updates[0].tolist() == [[-3.0, -2.0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_limit_lets_what_is_not_finite_go(policy):
    given = np.float32([[[np.inf, 0.5, np.nan], [1.0, 0.25, 1.0]]])
    with_one, without = (run(limited(limit=x, nonfinite=policy), given) for x in (1.0, None))
    np.testing.assert_array_equal(with_one.updates, without.updates)
    np.testing.assert_array_equal(with_one.residuals, without.residuals)


@pytest.mark.parametrize(("density", "rates"), [slow(0.5, 2.0), (0.05, 2.0), (0.025, 4.0)])
def test_limit_by_default_is_a_tenth_of_the_wait(density, rates):
    """An entry moves by this many learning rates, and by 1/4 of the excess."""
    rate, size = 0.125, 40
    tx = optax_ext.sparse_adamw(rate, density=density, axis="w", weight_decay=0.0)

    def worker(zeros):
        state = tx.init(zeros)
        # This worker's residual exceeds any limit at every entry.
        return tx.update(zeros, state._replace(residual=state.residual + 100.0))[0]

    moved = sc.simulate(worker, axis="w", axis_size=1)(jnp.zeros((1, size)))
    assert np.max(moved) == np.float32((100.0 + 3 * rates * rate) / 4)


RATE = 1e-3


def trained(gradients, density):
    """Parameters and the mean residual, ``f64[steps, n]``, in learning rates."""
    tx = optax_ext.sparse_adamw(RATE, density=density, axis="w", weight_decay=0.0)
    found = run(tx, gradients.astype(np.float32))
    moved, waits = found.updates[:, 0].astype(np.float64), found.residuals.astype(np.float64)
    return moved.cumsum(0) / RATE, waits.mean(1) / RATE


# A density, and the most steps that an entry then waits for its turn: half of the entries are
# steady, and so large that they take most of the slots.
@pytest.mark.parametrize(("density", "wait"), [(0.05, 20), (0.02, 50)])
@pytest.mark.one_in(2)
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
    # The steady half takes the slots, so each of its entries is delivered every wait / 2 steps.
    # Three times the gradients of this period may stay, and as much arrives before the next one.
    bound = 4 * gain * wait / 2
    assert (np.abs(waits[:, steady]) <= bound).all()
    half = steps // 2
    moved = -params[half - 1, steady]
    assert (moved >= gain * half - bound).all()
    # The parameters turn around within one or two waits, not after as long as they went on.
    turned = np.argmin(params[:, steady], axis=0)
    assert (turned <= half + 2 * wait).all()


@pytest.mark.slow
def test_noise_beside_many_steady_entries_moves():
    """An entry waits until its residual has grown to the size of theirs, which is bounded.

    The bound is 80 learning rates, as above: a walk of steps of 2 reaches it after some 1,600.
    """
    gradients = np.random.default_rng(0).standard_normal((1_600, 8, 512))
    gradients[:, :, ::2] = 1.0
    params, _ = trained(gradients, 0.05)
    assert (params[-1] == 0).mean() <= 0.01


@pytest.mark.parametrize("limit", [0.5, 2.0, 8.0])
@pytest.mark.one_in(3)
def test_limit_keeps_three_times_what_arrived_between_two_deliveries_at_most(limit):
    """The bound that is documented, for one entry that is delivered at every step."""
    rng = np.random.default_rng(1)
    arrived = rng.exponential(6.0, 200).astype(np.float32)
    found = run(limited(limit=limit), -arrived[:, None, None])
    updates, kept = found.updates[:, 0, 0], found.residuals[:, 0, 0]
    assert (kept <= 3 * np.maximum.accumulate(arrived)).all()
    assert kept.max() > 0
    np.testing.assert_allclose(updates.sum() + kept[-1], arrived.sum(), rtol=1e-5)


@pytest.mark.parametrize("negative", [False, True, "schedule"])
def test_a_negative_rate_goes_the_other_way(negative):
    """Also with a limit, which is a multiple of the learning rate."""
    sign = -1 if negative else 1
    rate = (lambda count: -0.1) if negative == "schedule" else 0.1 * sign
    tx = optax_ext.sparse_adamw(rate, axis="w", residual=optax_ext.residual(), weight_decay=0.0)
    usual = optax_ext.sparse_adamw(0.1, axis="w", residual=optax_ext.residual(), weight_decay=0.0)
    found, expected = (run(each, x).updates for each, x in ((tx, sign * GIVEN), (usual, GIVEN)))
    assert expected.any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
