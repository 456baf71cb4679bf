"""Selectors against a NumPy oracle, cold, warm and misled, and over many steps."""

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
from sparse_collectives._coo import kth_magnitude
from tests import jax_internals
from tests.reference import selection, windows
from tests.sparse_collectives.helpers import slow

SMALL = 1000
# Above kth_magnitude.DIRECT_SIZE: the selection among candidates.
LARGE = 140_001
LARGE_DENSITY = 0.01
LARGE_K = 1400
DTYPES = ("float32", "bfloat16", "float16")
FINITE_NAMES = tuple(
    name for name in selection.HARD_NAMES if np.isfinite(selection.hard_vector(name, SMALL)).all()
)


@functools.cache
def topk(density):
    return sc.select.topk(density=density)


@functools.cache
def select_topk(density):
    return jax.jit(topk(density).select)


@functools.cache
def large_vectors():
    return selection.hard_vectors(LARGE)


def k_of(density, size):
    return min(size, max(1, round(density * size)))


def as_dtype(x, dtype):
    """A float32 vector rounded to ``dtype``, as a NumPy array."""
    return np.asarray(jnp.asarray(x).astype(dtype))


def bits_of(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def check_coo(coo, acc, capacity):
    """What holds for every selection; returns the selected indices."""
    assert coo.size == acc.size
    assert coo.indices.shape == coo.values.shape == (capacity,)
    assert coo.indices.dtype == jnp.int32
    assert coo.values.dtype == acc.dtype
    indices, values = np.asarray(coo.indices), np.asarray(coo.values)
    used = int((indices < acc.size).sum())
    assert (indices[used:] == acc.size).all()
    assert not bits_of(values[used:]).any()
    assert (np.diff(indices[:used]) > 0).all()
    assert (indices[:used] >= 0).all()
    np.testing.assert_array_equal(bits_of(values[:used]), bits_of(acc[indices[:used]]))
    assert (acc[indices[:used]] != 0).all()
    return indices[:used]


def check_topk(out, acc, k):
    coo, state, info = out
    indices = check_coo(coo, acc, k)
    np.testing.assert_array_equal(indices, selection.topk(acc, k))
    assert info.selected == len(indices)
    assert info.overflow == 0
    assert info.threshold.dtype == jnp.float32
    np.testing.assert_array_equal(info.threshold, np.float32(selection.kth_magnitude(acc, k)))
    assert (state.shape, state.dtype) == ((), jnp.float32)
    # Whatever was seen or guessed, the next step starts from a magnitude.
    assert np.isfinite(state)
    assert state >= 0
    return state


def types_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def assert_same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


def test_the_oracle_on_cases_worked_by_hand():
    x = np.array([1, -3, 0, 3, np.nan, -np.inf, 2**-149, -1], np.float32)
    assert selection.topk(x, 1).tolist() == [4]
    assert selection.topk(x, 2).tolist() == [4, 5]
    assert selection.topk(x, 3).tolist() == [1, 4, 5]
    assert selection.topk(x, 5).tolist() == [0, 1, 3, 4, 5]
    assert selection.topk(x, 8).tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert selection.passing(x, 3.0).tolist() == [1, 3, 4, 5]
    assert selection.passing(x, 0.0).tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert selection.passing(x, math.nan).tolist() == [4]
    assert [selection.kth_magnitude(x, k) for k in (2, 3, 8)] == [math.inf, 3.0, 0.0]
    assert math.isnan(selection.kth_magnitude(x, 1))


class TestTopk:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("density", [1e-9, 0.1, 0.5, 1.0])
    def test_small_vectors_are_exact(self, dtype, density):
        k = k_of(density, SMALL)
        state = topk(density).init(SMALL)
        for x in selection.hard_vectors(SMALL).values():
            acc = as_dtype(x, dtype)
            state = check_topk(select_topk(density)(acc, state), acc, k)

    @pytest.mark.slow
    @settings(max_examples=50, deadline=None)
    @given(
        st.sampled_from(selection.HARD_NAMES),
        st.integers(0, 2**32 - 1),
        st.sampled_from([1e-9, 0.1, 1.0]),
        st.sampled_from([1, 33, SMALL]),
    )
    def test_small_vectors_by_seed_are_exact(self, name, seed, density, size):
        acc = selection.hard_vector(name, size, seed)
        out = select_topk(density)(acc, topk(density).init(size))
        check_topk(out, acc, k_of(density, size))

    @pytest.mark.parametrize("name", selection.HARD_NAMES)
    def test_large_vectors_are_exact_cold_and_warm(self, name):
        acc = large_vectors()[name]
        state = topk(LARGE_DENSITY).init(LARGE)
        for _ in range(3):
            state = check_topk(select_topk(LARGE_DENSITY)(acc, state), acc, LARGE_K)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_large_sixteen_bit_vectors_are_exact_cold_and_warm(self, dtype):
        state = topk(LARGE_DENSITY).init(LARGE)
        for x in large_vectors().values():
            acc = as_dtype(x, dtype)
            state = check_topk(select_topk(LARGE_DENSITY)(acc, state), acc, LARGE_K)

    @pytest.mark.parametrize("name", ["normal", "ties at the top", "few nonzeros", "not finite"])
    @pytest.mark.parametrize(
        "guess", [0.0, 1e-45, 1e-30, 0.5, 1e3, 1e30, math.inf, math.nan, -1.0, -math.inf]
    )
    def test_a_wrong_guess_changes_nothing(self, name, guess):
        acc = large_vectors()[name]
        state = check_topk(select_topk(LARGE_DENSITY)(acc, np.float32(guess)), acc, LARGE_K)
        check_topk(select_topk(LARGE_DENSITY)(acc, state), acc, LARGE_K)

    def test_a_state_from_another_distribution_changes_nothing(self):
        names = ["normal", "subnormal", "heavy tail", "all NaN", "large at the end", "all zero"]
        names += ["neighbors", "all magnitudes", "one nonzero", "half zeros", "all infinite"]
        state = topk(LARGE_DENSITY).init(LARGE)
        for name in names + names[::-1]:
            acc = large_vectors()[name]
            state = check_topk(select_topk(LARGE_DENSITY)(acc, state), acc, LARGE_K)

    @pytest.mark.parametrize("scale", [1e3, 1e-3])
    def test_a_jump_of_the_scale_changes_nothing(self, scale):
        acc = large_vectors()["normal"]
        _, state, _ = select_topk(LARGE_DENSITY)(acc, topk(LARGE_DENSITY).init(LARGE))
        assert state > 0
        acc = (acc * scale).astype(np.float32)
        check_topk(select_topk(LARGE_DENSITY)(acc, state), acc, LARGE_K)

    @pytest.mark.slow
    @settings(max_examples=50, deadline=None)
    @given(
        st.sampled_from(selection.HARD_NAMES),
        st.integers(0, 2**32 - 1),
        st.one_of(st.floats(width=32), st.floats(0, 8, width=32)),
    )
    def test_large_vectors_by_seed_and_guess_are_exact(self, name, seed, guess):
        acc = selection.hard_vector(name, LARGE, seed)
        check_topk(select_topk(LARGE_DENSITY)(acc, np.float32(guess)), acc, LARGE_K)

    @pytest.mark.parametrize("kind", ["only in the sample", "only beside the sample"])
    def test_a_misleading_sample_changes_nothing(self, kind):
        stride, _, _ = kth_magnitude._plan(LARGE, LARGE_K)
        looked_at = np.arange(LARGE) % stride == 0
        scale = np.where(looked_at == (kind == "only in the sample"), 1, 1e-4)
        acc = (scale * large_vectors()["normal"]).astype(np.float32)
        for guess in (0.0, 1e9):
            check_topk(select_topk(LARGE_DENSITY)(acc, np.float32(guess)), acc, LARGE_K)

    @pytest.mark.parametrize("density", [0.4, *slow(1e-9, 1.0)])
    def test_large_vectors_at_other_densities_are_exact(self, density):
        state = topk(density).init(LARGE)
        for name in ("normal", "all equal", "half zeros", "small integers", "all zero"):
            acc = large_vectors()[name]
            out = select_topk(density)(acc, state)
            state = check_topk(out, acc, k_of(density, LARGE))

    @pytest.mark.parametrize("size", [SMALL, LARGE])
    @pytest.mark.parametrize("name", FINITE_NAMES)
    def test_nothing_is_lost(self, size, name):
        acc = selection.hard_vector(name, size)
        density = LARGE_DENSITY if size == LARGE else 0.1
        coo, _, _ = select_topk(density)(acc, topk(density).init(size))
        sent = np.zeros(size + 1, np.float32)
        sent[np.asarray(coo.indices)] += np.asarray(coo.values)
        rest = acc - sent[:size]
        selected = np.isin(np.arange(size), selection.topk(acc, k_of(density, size)))
        assert not rest[selected].any()
        np.testing.assert_array_equal(bits_of(rest[~selected]), bits_of(acc[~selected]))

    @pytest.mark.parametrize("size", [SMALL, *slow(LARGE)])
    def test_jit_and_vmap_give_the_same_bits(self, size):
        density = LARGE_DENSITY if size == LARGE else 0.1
        vectors = selection.hard_vectors(size)
        names = ["normal", "ties at the top", "few nonzeros", "not finite", "all zero"]
        lanes = np.stack([vectors[name] for name in names])
        # One lane's guess fits, the others fail upwards, downwards and without any.
        guesses = np.array([2.5, 1e9, 1e-9, 0, math.nan], np.float32)
        batched = jax.jit(jax.vmap(topk(density).select))(lanes, guesses)
        for lane, (acc, guess) in enumerate(zip(lanes, guesses)):
            coo, state, info = select_topk(density)(acc, guess)
            of_lane = jax.tree.map(lambda leaf, lane=lane: leaf[lane], batched)
            assert_same_bits((of_lane[0], of_lane[2]), (coo, info))
            assert of_lane[1].dtype == state.dtype

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_eager_and_jit_give_the_same_bits(self, size):
        density = LARGE_DENSITY if size == LARGE else 0.1
        for name in ("ties at the top", "not finite"):
            acc = jnp.asarray(selection.hard_vector(name, size))
            state = jnp.float32(1e-9)
            coo, _, info = topk(density).select(acc, state)
            expected, _, expected_info = select_topk(density)(acc, state)
            assert_same_bits((coo, info), (expected, expected_info))

    def test_state_keeps_its_type_and_steps_are_traced_once(self):
        for size, density in ((SMALL, 0.1), (LARGE, LARGE_DENSITY)):
            # A selector of its own: jit shares its cache among equal functions.
            selector = sc.select.topk(density=density)
            function, state = jax.jit(selector.select), selector.init(size)
            types = types_of(state)
            vectors = selection.hard_vectors(size)
            for name in ("normal", "all zero", "not finite", "subnormal", "all equal"):
                _, state, _ = function(vectors[name], state)
                assert types_of(state) == types
            assert jax_internals.programs(function) == 1

    def test_a_warm_guess_is_close_above_k(self):
        _, state, _ = select_topk(LARGE_DENSITY)(large_vectors()["normal"], np.float32(0))
        other = selection.hard_vector("normal", LARGE, seed=5)
        candidates = len(selection.passing(other, float(state)))
        assert LARGE_K <= candidates <= 1.4 * LARGE_K


SIZE = 20_000
DENSITY = 0.05
K = 1000
STEPS = 200


@functools.cache
def reuse(**options):
    return sc.select.threshold_reuse(density=DENSITY, **options)


@functools.cache
def select_reuse(**options):
    return jax.jit(reuse(**options).select)


def normals(step, size=SIZE):
    return np.random.default_rng(step).standard_normal(size).astype(np.float32)


def check_reuse(out, acc, headroom=0.25, k=K):
    """What holds at each step; returns the state, info, and the selected indices."""
    coo, state, info = out
    capacity = min(acc.size, math.ceil((1 + headroom) * k))
    indices = check_coo(coo, acc, capacity)
    passing = selection.passing(acc, float(info.threshold))
    assert info.selected == len(indices) == min(len(passing), capacity)
    assert info.overflow == len(passing) - len(indices)
    assert np.isin(indices, passing).all()
    return state, info, indices


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


class TestThresholdReuse:
    @pytest.mark.parametrize("servo", [True, False, "fixed"])
    def test_the_threshold_is_exact_every_period_steps(self, servo):
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
    def test_the_first_threshold_is_exact_for_hard_vectors(self, name, servo):
        acc = selection.hard_vector(name, SIZE)
        out = select_reuse(servo=servo)(acc, reuse(servo=servo).init(SIZE))
        _, info, _ = check_reuse(out, acc)
        np.testing.assert_array_equal(info.threshold, np.float32(selection.kth_magnitude(acc, K)))

    def test_without_servo_the_threshold_stays_in_between(self):
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
    def test_the_servo_keeps_the_count_where_reuse_alone_drifts(self, kind):
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
    def test_fixed_factors_keep_the_count_nearer_than_reuse_alone(self, kind):
        fixed, without = (process(kind, servo) for servo in ("fixed", False))
        passed, alone = (np.asarray(info.selected + info.overflow) for info in (fixed, without))
        # A step may end with up to 4k/3, or, where it could not raise enough, with more.
        assert np.abs(passed / K - 1).mean() < 0.4 * np.abs(alone / K - 1).mean()

    def test_fixed_factors_are_those_of_the_published_program(self):
        # Growth that no raise is needed for, one that some make up for, and one that none does.
        factors = [1, 1.001, 1.05, 1.3, 1.3, 0.95, 0.7, 0.9, 1, 1, 0, 1e3]
        options = {"servo": "fixed", "period": 999, "headroom": 9.0}
        selector = jax.jit(reuse(**options).select)
        state, threshold, raises = reuse(**options).init(SIZE), None, []
        for factor in factors:
            acc = normals(0) * np.float32(factor)
            if threshold is None:
                threshold = np.float32(selection.kth_magnitude(acc, K))
            else:
                raises.append(0)
                while raises[-1] < 5 and 3 * (np.abs(acc) >= threshold).sum() > 4 * K:
                    threshold, raises[-1] = threshold * np.float32(1.03), raises[-1] + 1
            state, info, _ = check_reuse(selector(acc, state), acc, headroom=9.0)
            count = (np.abs(acc) >= threshold).sum()
            assert info.threshold == threshold
            assert info.selected + info.overflow == count
            if count > 5 * K / 4:
                threshold = threshold * np.float32(1.012)
            elif count < 2 * K / 3:
                threshold = threshold * np.float32(1 / 1.012)
        assert {0, 5} < set(raises)

    def test_a_servo_of_another_name_is_an_error(self):
        with pytest.raises(ValueError, match="servo must be one of True, False, 'fixed', got 'no'"):
            reuse(servo="no")

    @pytest.mark.parametrize("headroom", [0.0, 0.25, 1.7, 100.0])
    def test_capacity_and_overflow(self, headroom):
        options = {"servo": False, "headroom": headroom}
        state = reuse(**options).init(SIZE)
        for step in range(3):
            acc = normals(step) * np.float32(2**step)
            out = select_reuse(**options)(acc, state)
            state, info, _ = check_reuse(out, acc, headroom=headroom)
        passed = len(selection.passing(acc, float(info.threshold)))
        assert passed > 5 * K
        assert info.overflow == max(0, passed - math.ceil((1 + headroom) * K))

    def test_each_overflowing_entry_gets_its_turn(self):
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
    def test_ties_are_sent_and_take_turns(self, name, servo):
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
    def test_the_count_recovers_within_three_steps(self, name, held):
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

    def test_after_a_start_with_nothing_to_select_the_count_is_right_at_once(self):
        state = reuse().init(SIZE)
        for _ in range(3):
            acc = np.zeros(SIZE, np.float32)
            state, info, _ = check_reuse(select_reuse()(acc, state), acc)
            assert info.selected == 0
        state, info, _ = check_reuse(select_reuse()(normals(0), state), normals(0))
        assert info.selected == K

    def test_a_large_vector(self):
        acc = large_vectors()["normal"]
        selector = sc.select.threshold_reuse(density=LARGE_DENSITY, period=2)
        function, state = jax.jit(selector.select), selector.init(LARGE)
        for step in range(4):
            state, info, _ = check_reuse(function(acc, state), acc, k=LARGE_K)
            if step % 2 == 0:
                assert info.selected == LARGE_K
            acc = (acc * 1.03).astype(np.float32)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_sixteen_bit_values(self, dtype):
        state = reuse().init(SIZE)
        for step in range(5):
            acc = as_dtype(normals(step), dtype)
            state, info, _ = check_reuse(select_reuse()(acc, state), acc)
            # Several entries may have the same value of 8 or 11 bits.
            assert abs(int(info.selected) - K) <= 0.1 * K

    def test_density_one_takes_every_nonzero(self):
        selector = sc.select.threshold_reuse(density=1.0)
        function, state = jax.jit(selector.select), selector.init(SMALL)
        for step in range(6):
            acc = normals(step, SMALL)
            if step == 3:
                acc[::2] = 0
            state, _, indices = check_reuse(function(acc, state), acc, k=SMALL)
            np.testing.assert_array_equal(indices, np.flatnonzero(acc))

    @pytest.mark.slow
    @settings(max_examples=50, deadline=None)
    @given(
        st.lists(st.sampled_from(selection.HARD_NAMES), min_size=1, max_size=6),
        st.integers(0, 2**32 - 1),
        st.sampled_from([True, False, "fixed"]),
    )
    def test_what_is_reported_is_what_was_done(self, names, seed, servo):
        state = reuse(servo=servo).init(SIZE)
        types = types_of(state)
        for name in names:
            acc = selection.hard_vector(name, SIZE, seed)
            state, _, _ = check_reuse(select_reuse(servo=servo)(acc, state), acc)
            assert types_of(state) == types

    @pytest.mark.slow
    def test_eager_jit_and_vmap_give_the_same_selection(self):
        lanes = np.stack([normals(0), selection.hard_vector("few nonzeros", SIZE)])
        selector = reuse()
        state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), selector.init(SIZE))
        batched, _, infos = jax.jit(jax.vmap(selector.select))(lanes, state)
        for lane, acc in enumerate(lanes):
            expected, _, info = select_reuse()(acc, selector.init(SIZE))
            of_lane = jax.tree.map(lambda leaf, lane=lane: leaf[lane], (batched, infos))
            assert_same_bits(of_lane, (expected, info))
            eager, _, eager_info = selector.select(jnp.asarray(acc), selector.init(SIZE))
            assert_same_bits((eager, eager_info), (expected, info))

    def test_state_keeps_its_type_and_steps_are_traced_once(self):
        selector = sc.select.threshold_reuse(density=DENSITY, period=2)
        function, state = jax.jit(selector.select), selector.init(SIZE)
        types = types_of(state)
        for name in ("normal", "all zero", "not finite", "subnormal", "all equal"):
            _, state, _ = function(selection.hard_vector(name, SIZE), state)
            assert types_of(state) == types
        assert jax_internals.programs(function) == 1


SELECTORS = {"topk": sc.select.topk, "threshold_reuse": sc.select.threshold_reuse}


@pytest.fixture(params=SELECTORS)
def factory(request):
    return SELECTORS[request.param]


class TestErrors:
    @pytest.mark.parametrize("density", [0, 0.0, -1, 1.5, math.nan, math.inf, -math.inf])
    def test_a_density_out_of_range(self, factory, density):
        with pytest.raises(ValueError) as error:
            factory(density=density)
        self.check(error, "density", repr(density), "density=0.01")

    @pytest.mark.parametrize("density", [True, "0.1", None, 1j, [0.1], np.array([0.1])])
    def test_a_density_that_is_no_number(self, factory, density):
        with pytest.raises(TypeError) as error:
            factory(density=density)
        self.check(error, "density", repr(density), type(density).__name__, "density=0.01")

    def test_a_traced_density(self, factory):
        def function(density, acc):
            selector = factory(density=density)
            return selector.select(acc, selector.init(10))

        with pytest.raises(TypeError) as error:
            jax.jit(function)(0.1, np.ones(10, np.float32))
        self.check(error, "density", "traced", "static")

    @pytest.mark.parametrize("density", [1, np.int32(1)])
    def test_an_integer_1_may_mean_everything_or_1_percent(self, factory, density):
        with pytest.raises(ValueError) as error:
            factory(density=density)
        self.check(error, "density", repr(density), "density=1.0", "density=0.01")

    @pytest.mark.parametrize("density", [1.0, np.float32(1), np.float64(0.5), 1e-300])
    def test_any_real_number_in_range_is_a_density(self, factory, density):
        assert factory(density=density).init(10) is not None

    @pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float64", "complex64"])
    def test_an_accumulator_of_another_type(self, factory, dtype):
        selector = factory(density=0.1)
        with pytest.raises(TypeError) as error:
            selector.select(np.zeros(10, dtype), selector.init(10))
        self.check(error, "acc", dtype, "float32")

    @pytest.mark.parametrize("shape", [(), (2, 5), (1, 10)])
    def test_an_accumulator_that_is_no_vector(self, factory, shape):
        selector = factory(density=0.1)
        with pytest.raises(ValueError) as error:
            selector.select(jnp.zeros(shape), selector.init(10))
        self.check(error, "acc", str(shape), "Ravel")

    def test_an_empty_accumulator(self, factory):
        selector = factory(density=0.1)
        with pytest.raises(ValueError) as error:
            selector.select(jnp.zeros((0,)), selector.init(1))
        self.check(error, "size", "0", "at least 1")

    @pytest.mark.parametrize("size", [0, -1, 2**31])
    def test_a_size_out_of_range(self, factory, size):
        with pytest.raises(ValueError) as error:
            factory(density=0.1).init(size)
        self.check(error, "size", str(size))

    @pytest.mark.parametrize("period", [0, -1, 1.5, True, "32", None])
    def test_a_period_that_is_no_positive_integer(self, period):
        with pytest.raises(ValueError) as error:
            sc.select.threshold_reuse(density=0.1, period=period)
        self.check(error, "period", repr(period), "at least 1")

    @pytest.mark.parametrize("value", [-0.1, math.nan, -math.inf, True, "0.1", None])
    @pytest.mark.parametrize("name", ["tolerance", "headroom"])
    def test_a_number_out_of_range(self, name, value):
        with pytest.raises(ValueError) as error:
            sc.select.threshold_reuse(density=0.1, **{name: value})
        self.check(error, name, repr(value), "[0.0,")

    def test_an_infinite_tolerance_never_counts_again(self):
        options = {"tolerance": math.inf, "period": 100}
        _, state, _ = select_reuse(**options)(normals(0), reuse(**options).init(SIZE))
        acc = normals(1) * np.float32(1.2)
        _, info, _ = check_reuse(select_reuse(**options)(acc, state), acc)
        assert info.threshold == state.threshold

    @pytest.mark.slow
    def test_an_infinite_headroom_is_room_for_all(self):
        selector = sc.select.threshold_reuse(density=0.1, headroom=math.inf)
        coo, _, _ = selector.select(jnp.ones(100), selector.init(100))
        assert coo.capacity == 100

    @staticmethod
    def check(error, *words):
        for word in words:
            assert word in str(error.value)
