"""A threshold that is reused: exact every period, and close to k in between."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import sparse_collectives as sc
from tests.reference import selection, windows
from tests.sparse_collectives.helpers import slow
from tests.sparse_collectives.selecting import (
    LARGE,
    as_dtype,
    check_passing,
    hard_vectors,
    jitted,
    types_of,
)

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


def check_reuse(out, acc, headroom=0.25, k=K):
    """What holds at each step; returns the state, info, and the selected indices."""
    indices = check_passing(out, acc, min(acc.size, math.ceil((1 + headroom) * k)))
    return out[1], out[2], indices


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
    return jax.jit(lambda: lax.scan(step, start, keys)[1])()


def deviation(info):
    return float(np.mean(np.abs(np.asarray(info.selected) - K)) / K)


@pytest.mark.parametrize("servo", [True, False, "fixed"])
def test_the_threshold_is_exact_every_period_steps(servo):
    state = reuse(servo=servo, period=4).init(SIZE)
    for step in range(13):
        acc = normals(step) * np.float32(1.1**step)
        out = select_reuse(servo=servo, period=4)(acc, state)
        state, info, indices = check_reuse(out, acc)
        if step % 4 == 0:
            assert info.threshold == np.float32(selection.kth_magnitude(acc, K))
            np.testing.assert_array_equal(indices, selection.topk(acc, K))


@pytest.mark.parametrize("servo", [True, False, "fixed"])
@pytest.mark.parametrize("name", selection.HARD_NAMES)
def test_the_first_threshold_is_exact_for_hard_vectors(name, servo):
    acc = selection.hard_vector(name, SIZE)
    out = select_reuse(servo=servo)(acc, reuse(servo=servo).init(SIZE))
    _, info, _ = check_reuse(out, acc)
    np.testing.assert_array_equal(info.threshold, np.float32(selection.kth_magnitude(acc, K)))


def test_without_servo_the_threshold_stays_in_between():
    state = reuse(servo=False, period=5).init(SIZE)
    thresholds = []
    for step in range(15):
        acc = normals(step) * np.float32(1.2**step)
        out = select_reuse(servo=False, period=5)(acc, state)
        state, info, _ = check_reuse(out, acc)
        thresholds.append(float(info.threshold))
        assert thresholds[step] == thresholds[step - step % 5]
    assert len(set(thresholds)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["growing", "feedback"])
def test_the_servo_keeps_the_count_where_reuse_alone_drifts(kind):
    with_servo, without = process(kind, True), process(kind, False)
    assert deviation(with_servo) <= 0.05
    assert deviation(without) >= 0.15
    # What passes, and not only what finds a slot.
    passed = np.asarray(without.selected + without.overflow)
    assert passed.max() > 3 * K
    passed = np.asarray(with_servo.selected + with_servo.overflow)
    assert passed.max() < 1.2 * K
    assert passed.min() > 0.8 * K


@pytest.mark.parametrize("kind", ["growing", "feedback"])
def test_fixed_factors_keep_the_count_nearer_than_reuse_alone(kind):
    fixed, without = (process(kind, servo) for servo in ("fixed", False))
    passed, alone = (np.asarray(info.selected + info.overflow) for info in (fixed, without))
    # A step may end with up to 4k/3, or, where it could not raise enough, with more.
    assert np.abs(passed / K - 1).mean() < 0.4 * np.abs(alone / K - 1).mean()


def test_fixed_factors_are_those_of_the_published_program():
    # Growth that no raise is needed for, one that some make up for, and one that none does.
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
        state, info, _ = check_reuse(select_reuse(**options)(acc, state), acc, headroom=9.0)
        count = (np.abs(acc) >= threshold).sum()
        assert info.threshold == threshold
        assert info.selected + info.overflow == count
        if count > 5 * K / 4:
            threshold = threshold * np.float32(1.012)
        elif count < 2 * K / 3:
            threshold = threshold * np.float32(1 / 1.012)
    assert {0, 5} < set(raises)


@pytest.mark.parametrize("headroom", [0.0, 0.25, 1.7, 100.0])
def test_capacity_and_overflow(headroom):
    options = {"servo": False, "headroom": headroom}
    state = reuse(**options).init(SIZE)
    for step in range(3):
        acc = normals(step) * np.float32(2**step)
        out = select_reuse(**options)(acc, state)
        state, info, _ = check_reuse(out, acc, headroom=headroom)
    passed = len(selection.passing(acc, float(info.threshold)))
    assert passed > 5 * K
    assert info.overflow == max(0, passed - math.ceil((1 + headroom) * K))


def test_each_overflowing_entry_gets_its_turn():
    options = {"servo": False, "period": 999}
    _, state, _ = select_reuse(**options)(normals(0), reuse(**options).init(SIZE))
    acc = normals(1) * np.float32(3)
    seen = np.zeros(SIZE, bool)
    passed = selection.passing(acc, float(state.threshold))
    assert len(passed) > 4 * K
    for _ in range(windows.steps_for_all(1.25 * K, len(passed))):
        state, info, indices = check_reuse(select_reuse(**options)(acc, state), acc)
        assert len(indices) == 1.25 * K
        seen[indices] = True
    np.testing.assert_array_equal(np.flatnonzero(seen), passed)


@pytest.mark.parametrize("servo", [False, *slow(True)])
@pytest.mark.parametrize("name", ["small integers", "ties at the top", *slow("all equal")])
def test_ties_are_sent_and_take_turns(name, servo):
    acc = selection.hard_vector(name, SIZE)
    state = reuse(servo=servo).init(SIZE)
    largest = selection.passing(acc, float(np.abs(acc).max()))
    seen = np.zeros(SIZE, bool)
    # At some steps as few as K / 2 have a slot.
    enough = windows.steps_for_all(K / 2, max(K, len(largest)))
    for step in range(enough):
        state, info, indices = check_reuse(select_reuse(servo=servo)(acc, state), acc)
        assert int(info.selected) >= K / 2, f"step {step}"
        seen[indices] = True
    assert seen[largest].all()


@pytest.mark.parametrize(
    "name", ["times 1e3", "times 1e-3", "times 1e9", "times 1e-9", "zeros", "few", "NaN", "inf"]
)
@pytest.mark.parametrize("held", [1, 5])
def test_the_count_recovers_within_three_steps(name, held):
    # No periodic evaluation comes to help.
    options = {"period": 10**6}
    index = np.arange(SIZE)
    change = {
        "zeros": lambda x: x * 0,
        "few": lambda x: np.where(index % 100 == 0, x, 0),
        "NaN": lambda x: np.where(index % 10 == 0, np.nan, x),
        "inf": lambda x: np.where(index % 10 == 0, np.inf, x),
    }.get(name) or (lambda x: x * float(name.removeprefix("times ")))
    state = reuse(**options).init(SIZE)
    changed = range(5, 5 + held)
    for step in range(20):
        acc = normals(step)
        if step in changed:
            acc = change(acc).astype(np.float32)
        state, info, _ = check_reuse(select_reuse(**options)(acc, state), acc)
        steady = step < 5 or step >= 5 + held + 3
        jumped = name.startswith("times") and 5 + 3 <= step < 5 + held
        if steady or jumped:
            assert abs(int(info.selected) - K) <= 0.05 * K, f"step {step}"


def test_after_a_start_with_nothing_to_select_the_count_is_right_at_once():
    state = reuse().init(SIZE)
    for _ in range(3):
        acc = np.zeros(SIZE, np.float32)
        state, info, _ = check_reuse(select_reuse()(acc, state), acc)
        assert info.selected == 0
    state, info, _ = check_reuse(select_reuse()(normals(0), state), normals(0))
    assert info.selected == K


def test_a_large_vector():
    acc = hard_vectors(LARGE)["normal"]
    selector, function = jitted("threshold_reuse", density=0.01, period=2)
    state = selector.init(LARGE)
    for step in range(4):
        state, info, _ = check_reuse(function(acc, state), acc, k=1400)
        if step % 2 == 0:
            assert info.selected == 1400
        acc = (acc * 1.03).astype(np.float32)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(selection.HARD_NAMES), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.sampled_from([True, False, "fixed"]),
)
def test_what_is_reported_is_what_was_done(names, seed, servo):
    state = reuse(servo=servo).init(SIZE)
    types = types_of(state)
    for name in names:
        acc = selection.hard_vector(name, SIZE, seed)
        state, _, _ = check_reuse(select_reuse(servo=servo)(acc, state), acc)
        assert types_of(state) == types


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_values(dtype):
    state = reuse().init(SIZE)
    for step in range(5):
        acc = as_dtype(normals(step), dtype)
        state, info, _ = check_reuse(select_reuse()(acc, state), acc)
        # Several entries may have the same value of 8 or 11 bits.
        assert abs(int(info.selected) - K) <= 0.1 * K


def test_an_infinite_tolerance_never_counts_again():
    options = {"tolerance": math.inf, "period": 100}
    _, state, _ = select_reuse(**options)(normals(0), reuse(**options).init(SIZE))
    acc = normals(1) * np.float32(1.2)
    _, info, _ = check_reuse(select_reuse(**options)(acc, state), acc)
    assert info.threshold == state.threshold


@pytest.mark.slow
def test_an_infinite_headroom_is_room_for_all():
    selector = sc.select.threshold_reuse(density=0.1, headroom=math.inf)
    coo, _, _ = selector.select(jnp.ones(100), selector.init(100))
    assert coo.capacity == 100


@pytest.mark.parametrize(
    ("name", "values", "fix"),
    [
        ("servo", ["no"], "one of True, False, 'fixed'"),
        ("period", [0, -1, 1.5, True, "32", None], "at least 1"),
        ("tolerance", [-0.1, math.nan, -math.inf, True, "0.1", None], "[0.0,"),
        ("headroom", [-0.1, math.nan, -math.inf, True, "0.1", None], "[0.0,"),
    ],
)
def test_an_option_out_of_range(name, values, fix):
    for value in values:
        with pytest.raises(ValueError, match=name) as error:
            sc.select.threshold_reuse(density=0.1, **{name: value})
        assert repr(value) in str(error.value)
        assert fix in str(error.value)
