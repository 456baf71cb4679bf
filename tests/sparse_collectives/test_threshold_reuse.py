"""A threshold that is reused: exact every period, and close to k in between."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparse_collectives as sc
from tests.reference import selection
from tests.sparse_collectives.selecting import check_passing, hard_vectors, jitted

SIZE = 20_000
DENSITY = 0.05
K = 1000
STEPS = 200


def reuse(**options):
    return jitted("threshold_reuse", density=DENSITY, **options)[0]


def select_reuse(**options):
    return jitted("threshold_reuse", density=DENSITY, **options)[1]


def normals(step, size=SIZE):
    return np.random.default_rng(step).standard_normal(size).astype(np.float32)


def step(acc, state, k=K, **options):
    """Takes a step and checks it; returns the state, the info and the selected indices."""
    capacity = min(acc.size, math.ceil((1 + options.get("headroom", 0.25)) * k))
    out = select_reuse(**options)(acc, state)
    return out[1], out[2], check_passing(out, acc, capacity, int(state.count))


@functools.cache
def process(kind, servo, size=SIZE):
    """The selected counts over many steps, in one program.

    ``growing``: new noise that grows by 3 % a step. ``feedback``: noise is added
    to an accumulator from which the selected entries are removed.
    """
    selector = reuse(servo=servo)

    def step(carry, key):
        acc, state, scale = carry
        noise = jax.random.normal(key, (size,))
        acc = noise * scale if kind == "growing" else acc + noise
        coo, state, info = selector.select(acc, state)
        acc = acc.at[coo.indices].set(0, mode="drop")
        return (acc, state, scale * 1.03), info

    keys = jax.random.split(jax.random.key(7), STEPS)
    start = (jnp.zeros((size,)), selector.init(size), jnp.float32(1))
    info = jax.jit(lambda: lax.scan(step, start, keys)[1])()
    return jax.tree.map(lambda x: np.asarray(x, np.float64), info)


@pytest.mark.parametrize("servo", [True, False, "fixed"])
def test_reused_threshold_is_exact_every_period_steps_and_stays_without_servo(servo):
    state, thresholds = reuse(servo=servo, period=4).init(SIZE), []
    for count in range(13):
        acc = normals(count) * np.float32(1.1**count)
        state, info, indices = step(acc, state, servo=servo, period=4)
        thresholds.append(float(info.threshold))
        if count % 4 == 0:
            assert info.threshold == np.float32(selection.kth_magnitude(acc, K))
            np.testing.assert_array_equal(indices, selection.topk(acc, K))
        elif servo is False:
            assert thresholds[count] == thresholds[count - 1]
    assert len(set(thresholds)) >= 4


@pytest.mark.parametrize("servo", [True, False, "fixed"])
def test_reused_threshold_is_exact_at_first_for_hard_vectors(servo):
    later = reuse(servo=servo).init(SIZE)
    for acc in hard_vectors(SIZE).values():
        _, info, _ = step(acc, reuse(servo=servo).init(SIZE), servo=servo)
        np.testing.assert_array_equal(info.threshold, np.float32(selection.kth_magnitude(acc, K)))
        # The report is also correct after any other vector.
        later, _, _ = step(acc, later, servo=servo)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["growing", "feedback"])
def test_servo_keeps_the_count_where_reuse_alone_drifts(kind):
    servo, without, fixed = (process(kind, servo) for servo in (True, False, "fixed"))
    assert np.abs(servo.selected - K).mean() <= 0.05 * K
    assert np.abs(without.selected - K).mean() >= 0.15 * K
    # All entries that pass, including those without a slot.
    servo, without, fixed = (info.selected + info.overflow for info in (servo, without, fixed))
    assert without.max() > 3 * K
    assert 0.8 * K < servo.min() <= servo.max() < 1.2 * K
    # A step may end with up to 4k/3, or with more if it could not raise the threshold enough.
    assert np.abs(fixed - K).mean() < 0.4 * np.abs(without - K).mean()


def test_fixed_factors_are_those_of_the_published_program():
    # Growth that needs no raise, growth that some raises make up for, and growth beyond any raise.
    factors = [1, 1.001, 1.05, 1.3, 1.3, 0.95, 0.7, 0.9, 1, 1, 0, 1e3]
    options = {"servo": "fixed", "period": 999, "headroom": 9.0}
    state, threshold, raises = reuse(**options).init(SIZE), None, []
    for factor in factors:
        acc = normals(0) * np.float32(factor)
        if threshold is None:
            threshold = np.float32(selection.kth_magnitude(acc, K))
        else:
            raises.append(0)
            while raises[-1] < 5 and 3 * (np.abs(acc) >= threshold).sum() > 4 * K:
                threshold, raises[-1] = threshold * np.float32(1.03), raises[-1] + 1
        state, info, _ = step(acc, state, **options)
        count = (np.abs(acc) >= threshold).sum()
        assert info.threshold == threshold
        assert info.selected + info.overflow == count
        if count > 5 * K / 4:
            threshold = threshold * np.float32(1.012)
        elif count < 2 * K / 3:
            threshold = threshold * np.float32(1 / 1.012)
    assert {0, 5} < set(raises)


def changed(name, x):
    """The vector that a step gets instead of ``x``."""
    index, one, ten = np.arange(SIZE), x * np.float32(1), np.arange(SIZE) % 10 == 0
    return {
        "zeros": one * 0,
        "few": np.where(index % 100 == 0, one, 0),
        "NaN": np.where(ten, np.nan, one),
        "inf": np.where(ten, np.inf, one),
        "ties": np.sign(one) * np.ceil(np.abs(one)),
    }[name].astype(np.float32)


@pytest.mark.parametrize("change", [1e3, 1e-3, 1e9, 1e-9, "zeros", "few", "NaN", "inf", "ties"])
@pytest.mark.parametrize("held", [1, 5])
def test_servo_recovers_the_count_within_three_steps(change, held):
    state, scaled = reuse(period=10**6).init(SIZE), isinstance(change, float)
    for count in range(20):
        acc, after = normals(count), count - 5
        if 0 <= after < held:
            acc = (acc * np.float32(change)) if scaled else changed(change, acc)
        # No periodic evaluation helps.
        state, info, _ = step(acc, state, period=10**6)
        if after < 0 or after >= held + 3 or (scaled and 3 <= after < held):
            assert abs(int(info.selected) - K) <= 0.05 * K, f"step {count}"
        if change == "ties":
            assert 2 * int(info.selected) >= K


def test_servo_is_right_at_once_after_a_start_with_nothing_to_select():
    state = reuse().init(SIZE)
    for _ in range(3):
        state, info, _ = step(np.zeros(SIZE, np.float32), state)
        assert info.selected == 0
    _, info, _ = step(normals(0), state)
    assert info.selected == K


@pytest.mark.slow
def test_tolerance_and_headroom_may_be_infinite():
    options = {"tolerance": math.inf, "period": 100}
    state, _, _ = step(normals(0), reuse(**options).init(SIZE), **options)
    _, info, _ = step(normals(1) * np.float32(1.2), state, **options)
    assert info.threshold == state.threshold
    assert (
        sc.select.threshold_reuse(density=0.1, headroom=math.inf)
        .select(jnp.ones(100), reuse().init(100))[0]
        .capacity
        == 100
    )
