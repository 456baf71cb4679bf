"""Selectors that estimate their threshold, against NumPy oracles, in float32 and float16."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_collectives.select.published._sidco import SIDCoState
from tests.reference import estimators, selection
from tests.sparse_collectives.helpers import slow, slow_but
from tests.sparse_collectives.selecting import (
    SMALL,
    as_dtype,
    check_passing,
    hard_vectors,
    jitted,
    k_of,
    laplace,
)

SIZE, K = 10_007, 100
MOMENTS = ("normal", "half zeros", "ascending", "large at the end", "heavy tail", "not finite")
HUGE = np.finfo(np.float16).max / np.float16(2)
# The factory, its options, and slots as a multiple of k.
FACTORIES = {
    "gaussian_k": ("gaussian_k", {}, 1.25),
    "gaussian_k adjusted": ("gaussian_k", {"adjust": True}, 1.25),
    "redsync": ("redsync", {}, 2.0),
    "sidco exponential": ("sidco", {}, 1.25),
    "sidco gamma": ("sidco", {"distribution": "gamma"}, 1.25),
    "sidco pareto": ("sidco", {"distribution": "pareto"}, 1.25),
    "threshold_reuse": ("threshold_reuse", {}, 1.25),
    "dgc": ("dgc", {}, 1.0),
}
ESTIMATED = [name for name in FACTORIES if name not in ("dgc", "threshold_reuse")]


def made(name, density=K / SIZE):
    factory, options, _ = FACTORIES[name]
    return jitted(factory, density=density, **options)


def check(name, out, acc, k=K, turn=0):
    """Checks of every selection; returns its indices. DGC takes the largest if there are many."""
    slots = min(acc.size, math.ceil(FACTORIES[name][2] * k))
    return check_passing(out, acc, slots, None if name == "dgc" else turn)


@functools.cache
def float16_vectors():
    """Rounded hard vectors, and vectors at the limits of float16, whose sums exceed it."""
    integers = np.random.default_rng(0).integers(-3, 4, SMALL).astype(np.float16)
    with np.errstate(over="ignore"):
        vectors = {name: x.astype(np.float16) for name, x in hard_vectors(SMALL).items()}
    large = np.where(np.arange(SMALL) % 3, HUGE, -HUGE) + integers
    return vectors | {"smallest": integers * np.float16(2**-24), "largest": large}


# A vector, and sizes below one row of the reductions, a multiple of it, and next to a multiple.
SIZES = ((SIZE, K / SIZE), (1, 0.1), (2048, 0.1), (2051, 1e-9))


@pytest.mark.parametrize("name", slow_but(("sidco exponential", "sidco pareto"), FACTORIES))
@pytest.mark.one_in(2)
def test_estimators_send_what_reaches_the_threshold_as_far_as_there_are_slots(name):
    """Step after step, in one program for each size and dtype."""
    cases = [(hard_vectors(size), density) for size, density in SIZES]
    for vectors, density in [*cases, (float16_vectors(), K / SMALL)]:
        selector, select = made(name, density)
        size = vectors["normal"].size
        state = selector.init(size)
        for turn, (case, acc) in enumerate(vectors.items()):
            out = select(acc, state)
            indices, state = check(name, out, acc, k_of(density, size), turn), out[1]
            # A selector finds an entry if there is one, except two: a sample may have no hit, and
            # the threshold may be from the step before.
            if name not in ("dgc", "threshold_reuse"):
                assert len(indices) >= min(1, np.count_nonzero(acc)), case


@pytest.mark.parametrize("name", [*ESTIMATED, *slow("dgc")])
@pytest.mark.parametrize("exponent", [-100, -50, 50, 100])
def test_estimators_do_not_depend_on_the_scale(name, exponent):
    acc, (selector, select) = laplace(SIZE), made(name)
    coo, _, _ = select(acc, selector.init(SIZE))
    scaled, _, _ = select(acc * np.float32(2.0**exponent), selector.init(SIZE))
    np.testing.assert_array_equal(scaled.indices, coo.indices)


@pytest.mark.parametrize("name", slow_but(FACTORIES.keys() - {"dgc"}, FACTORIES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.one_in(3)
def test_sixteen_bits_select_what_float32_does(name, dtype):
    selector, select = made(name, K / SMALL)
    acc = as_dtype(laplace(SMALL), dtype)
    coo, _, info = out = select(acc, selector.init(SMALL))
    check(name, out, acc)
    # Values are exact: the same entries have the same magnitudes.
    wide, _, wide_info = select(acc.astype(np.float32), selector.init(SMALL))
    np.testing.assert_array_equal(coo.indices, wide.indices)
    np.testing.assert_array_equal(np.asarray(coo.values, np.float32), wide.values)
    assert float(info.threshold) == pytest.approx(float(wide_info.threshold), rel=1e-6)


# Thresholds.


def threshold_of(name, acc, state=None):
    selector, select = made(name, K / acc.size)
    return float(select(acc, selector.init(acc.size) if state is None else state)[2].threshold)


@pytest.mark.parametrize("hard", [*MOMENTS, "laplace", "float16 normal", "float16 largest"])
def test_thresholds_of_gaussian_k_and_redsync(hard):
    if hard.startswith("float16"):
        acc = float16_vectors()[hard.removeprefix("float16 ")]
    else:
        acc = laplace(SIZE) if hard == "laplace" else hard_vectors(SIZE)[hard]
    gaussian = estimators.gaussian_k(acc, K)
    assert threshold_of("gaussian_k", acc) == pytest.approx(gaussian, rel=1e-4)
    redsync = estimators.redsync(acc, K)
    assert threshold_of("redsync", acc) == pytest.approx(redsync, rel=1e-4)
    if acc.dtype == np.float16:
        exponential = estimators.sidco(acc, K, "exponential", 1)
        assert threshold_of("sidco exponential", acc) == pytest.approx(exponential, rel=1e-4)
        return
    lowered = estimators.lowered(acc, gaussian, K)
    assert threshold_of("gaussian_k adjusted", acc) == pytest.approx(lowered, rel=1e-4)
    if hard != "not finite":
        assert K <= int(made("redsync")[1](acc, jnp.int32(0))[2].selected) <= 2 * K


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
@pytest.mark.parametrize("hard", ["normal", "half zeros", "laplace", "NaN"])
def test_thresholds_of_sidco(distribution, hard):
    acc = hard_vectors(SIZE)[hard] if hard in MOMENTS else laplace(SIZE)
    if hard == "NaN":
        acc[::1000] = np.nan
    for stages in (1, 2, 3, 4):
        state = SIDCoState(jnp.int32(0), jnp.int32(stages), jnp.float32(0))
        expected = estimators.sidco(acc, K, distribution, stages)
        found = threshold_of(f"sidco {distribution}", acc, state)
        assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_dgc_selects_the_largest_of_what_passes():
    size, k = 200_003, 2000
    acc = laplace(size)
    one, function = jitted("dgc", density=k / size, sample_share=0.05)
    state, thresholds = one.init(size), []
    for _ in range(8):
        out = function(acc, state)
        indices, state = check("dgc", out, acc, k), out[1]
        passed = selection.passing(acc, float(out[2].threshold))
        # 100 expected hits: five standard deviations.
        assert 0.5 * k < len(passed) < 1.6 * k
        if len(passed) > k:
            np.testing.assert_array_equal(indices, selection.topk(acc, k))
        thresholds.append(float(out[2].threshold))
    # A new sample at each step, and the same one for the same step.
    assert len(set(thresholds)) == 8
    assert float(function(acc, one.init(size))[2].threshold) == thresholds[0]


def test_dgc_with_all_entries_as_the_sample_is_exact():
    for hard in selection.HARD_NAMES:
        acc = selection.hard_vector(hard, 1000)
        out = made("dgc", 0.01)[1](acc, jnp.int32(0))
        passed = selection.passing(acc, selection.kth_magnitude(acc, 10))
        assert int(out[2].selected) == min(10, len(passed)), hard
        if len(passed) <= 10:
            np.testing.assert_array_equal(check("dgc", out, acc, 10), selection.topk(acc, 10))


# How well a distribution fits.


@pytest.mark.slow
def test_gaussian_k_is_right_for_normal_entries_and_selects_far_too_few_of_a_short_tail():
    rng = np.random.default_rng(0)
    size, k = 100_000, 1000
    # Besides normal entries, a wide body without a tail: two bumps at -1 and 1, and small entries.
    body = rng.choice([-1.0, 1.0], size) + 0.05 * rng.standard_normal(size)
    bumps = np.where(rng.random(size) < 0.5, body, 0.01 * body).astype(np.float32)

    def selected(name, acc):
        selector, select = made(name, 0.01)
        return int(select(acc, selector.init(size))[2].selected) / k

    normal = rng.standard_normal(size).astype(np.float32)
    assert 0.8 < selected("gaussian_k", normal) < 1.2
    assert selected("gaussian_k", bumps) < 0.1
    assert selected("gaussian_k adjusted", bumps) >= 0.75
    assert 0.9 < selected("threshold_reuse", bumps) < 1.1


@pytest.mark.slow
def test_sidco_stages_follow_the_count():
    # The tail of normal entries is shorter than exponential: one stage is not enough.
    one, function = jitted("sidco", density=0.01)
    state = one.init(100_000)
    acc = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    stages, selected = [], []
    for _ in range(20):
        _, state, info = function(acc, state)
        stages.append(int(state.stages))
        selected.append(int(info.selected))
    assert stages[:4] == [1] * 4
    assert stages[4] == 2
    assert max(stages) <= 4
    assert abs(math.log(selected[-1] / 1000)) < abs(math.log(selected[0] / 1000))
    # The number of stages falls again if far too many entries pass.
    _, function = jitted("sidco", density=0.01, period=1)
    crowded = np.where(np.arange(100_000) % 10 == 0, 1, 1e-6).astype(np.float32)
    state = SIDCoState(state.count, jnp.int32(3), jnp.float32(0))
    for expected in (2, 1, 1):
        _, state, _ = function(crowded, state)
        assert int(state.stages) == expected
