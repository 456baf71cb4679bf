"""Selectors that estimate their threshold, against NumPy oracles, in float32 and float16."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_collectives.select.published._sidco import SIDCoState
from tests.reference import estimators, selection, windows
from tests.sparse_collectives.helpers import slow, slow_but
from tests.sparse_collectives.selecting import (
    SMALL,
    as_dtype,
    check_passing,
    hard_vectors,
    jitted,
    laplace,
)

SIZE, K = 10_007, 100
# Below one row of the reductions, a multiple of it, and beside.
SIZES = ((1, 0.1), (2048, 0.1), (2051, 1e-9))
MOMENTS = ("normal", "half zeros", "ascending", "large at the end", "heavy tail", "not finite")
# The factory, its options, and slots as a multiple of k.
FACTORIES = {
    "gaussian_k": ("gaussian_k", {}, 1.25),
    "gaussian_k adjusted": ("gaussian_k", {"adjust": True}, 1.25),
    "redsync": ("redsync", {}, 2.0),
    "sidco exponential": ("sidco", {}, 1.25),
    "sidco gamma": ("sidco", {"distribution": "gamma"}, 1.25),
    "sidco pareto": ("sidco", {"distribution": "pareto"}, 1.25),
    "dgc": ("dgc", {}, 1.0),
}
WITHOUT_DGC = [name for name in FACTORIES if name != "dgc"]
OF_FLOAT16 = {
    **{
        name: FACTORIES[name] for name in WITHOUT_DGC if name not in ("sidco gamma", "sidco pareto")
    },
    "threshold_reuse": ("threshold_reuse", {}, 1.25),
    "dgc": FACTORIES["dgc"],
}


def made(name, density=K / SIZE):
    factory, options, _ = (FACTORIES | OF_FLOAT16)[name]
    return jitted(factory, density=density, **options)


def check(name, out, acc, k=K, turn=None):
    """What holds of every selection; returns the selected indices."""
    slots = (FACTORIES | OF_FLOAT16)[name][2]
    capacity = min(acc.size, math.ceil(slots * k))
    return check_passing(out, acc, capacity, None if name == "dgc" else turn)


def follow(name, vectors, density):
    """Step after step, in one program."""
    selector, select = made(name, density)
    acc = next(iter(vectors.values()))
    state = selector.init(acc.size)
    for case, acc in vectors.items():
        out = select(acc, state)
        indices = check(name, out, acc)
        state = out[1]
        # Something is selected wherever there is something to select; two may find nothing: a
        # sample without a hit, and a threshold of the step before.
        if name not in ("dgc", "threshold_reuse"):
            assert len(indices) >= min(1, np.count_nonzero(acc)), case


@pytest.fixture(params=FACTORIES)
def name(request):
    return request.param


@pytest.mark.parametrize("name", slow_but(("sidco exponential", "sidco pareto"), FACTORIES))
def test_hard_vectors_step_after_step(name):
    follow(name, hard_vectors(SIZE), K / SIZE)


@pytest.mark.parametrize(
    ("name", "size", "density"),
    [
        pytest.param(name, *each, marks=pytest.mark.slow if name == "dgc" and each[0] > 1 else ())
        for name in FACTORIES
        for each in SIZES
    ],
)
def test_any_size(name, size, density):
    selector, select = made(name, density)
    for hard in ("normal", "small integers", "not finite", "all zero"):
        acc = selection.hard_vector(hard, size)
        out = select(acc, selector.init(size))
        check(name, out, acc, max(1, round(density * size)), turn=0)


@pytest.mark.parametrize("name", [*WITHOUT_DGC, *slow("dgc")])
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_the_scale_does_not_matter(name, scale):
    acc, (selector, select) = laplace(SIZE), made(name)
    power = np.float32(2.0 ** round(math.log2(scale)))
    coo, _, _ = select(acc, selector.init(SIZE))
    scaled, _, _ = select(acc * power, selector.init(SIZE))
    np.testing.assert_array_equal(scaled.indices, coo.indices)


def test_not_a_number_is_sent_and_hides_nothing(name):
    acc, (selector, select) = laplace(SIZE), made(name)
    state = selector.init(SIZE)
    _, _, info = select(acc, state)
    acc[17], acc[18], acc[SIZE - 1] = np.nan, np.inf, -np.inf
    out = select(acc, state)
    check(name, out, acc)
    if out[2].overflow == 0:
        assert np.isin([17, 18, SIZE - 1], out[0].indices).all()
    assert float(out[2].threshold) == pytest.approx(float(info.threshold), rel=0.1)
    assert int(out[2].selected) >= 0.9 * int(info.selected)


# Of `dgc` the k largest are selected, not a window.
@pytest.mark.parametrize("name", slow_but({*WITHOUT_DGC} - {"sidco gamma"}, WITHOUT_DGC))
def test_each_overflowing_entry_gets_its_turn(name):
    acc, (selector, select) = selection.hard_vector("all equal", 500), made(name, 0.1)
    state, seen = selector.init(500), np.zeros(500, bool)
    # At some steps of sidco fewer than k = 50 have a slot.
    for _ in range(windows.steps_for_all(40, 500)):
        out = select(acc, state)
        state = out[1]
        seen[check(name, out, acc, 50)] = True
    assert seen.all()


# Thresholds.


def threshold_of(name, acc, state):
    return float(made(name)[1](acc, state)[2].threshold)


@pytest.mark.parametrize("hard", [*MOMENTS, "laplace"])
def test_thresholds_of_gaussian_k_and_redsync(hard):
    acc = laplace(SIZE) if hard == "laplace" else hard_vectors(SIZE)[hard]
    state = jnp.int32(0)
    gaussian, redsync = estimators.gaussian_k(acc, K), estimators.redsync(acc, K)
    lowered = estimators.lowered(acc, gaussian, K)
    assert threshold_of("gaussian_k", acc, state) == pytest.approx(gaussian, rel=1e-4)
    assert threshold_of("gaussian_k adjusted", acc, state) == pytest.approx(lowered, rel=1e-4)
    assert threshold_of("redsync", acc, state) == pytest.approx(redsync, rel=1e-4)
    if hard != "not finite":
        assert K <= int(made("redsync")[1](acc, state)[2].selected) <= 2 * K


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("hard", ["normal", "half zeros", "laplace", "NaN"])
def test_thresholds_of_sidco(distribution, stages, hard):
    acc = hard_vectors(SIZE)[hard] if hard in MOMENTS else laplace(SIZE)
    if hard == "NaN":
        acc[::1000] = np.nan
    state = SIDCoState(jnp.int32(0), jnp.int32(stages), jnp.float32(0))
    expected = estimators.sidco(acc, K, distribution, stages)
    assert threshold_of(f"sidco {distribution}", acc, state) == pytest.approx(expected, rel=2e-3)


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


def test_gaussian_k_is_right_for_normal_entries():
    acc = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    _, _, info = made("gaussian_k", 0.01)[1](acc, jnp.int32(0))
    assert 800 < int(info.selected) < 1200


@pytest.mark.slow
def test_gaussian_k_selects_far_too_few_of_a_short_tail_and_threshold_reuse_does_not():
    # A wide body and no tail: two bumps at -1 and 1, and small entries.
    rng = np.random.default_rng(0)
    size, k = 100_000, 1000
    body = rng.choice([-1.0, 1.0], size) + 0.05 * rng.standard_normal(size)
    acc = np.where(rng.random(size) < 0.5, body, 0.01 * body).astype(np.float32)
    selected = {}
    for name in ("gaussian_k", "gaussian_k adjusted", "threshold_reuse"):
        one, function = made(name, 0.01)
        selected[name] = int(function(acc, one.init(size))[2].selected)
    assert selected["gaussian_k"] < k / 10
    assert selected["gaussian_k adjusted"] >= 3 * k / 4
    assert 0.9 * k < selected["threshold_reuse"] < 1.1 * k


@pytest.mark.slow
def test_the_stages_of_sidco_follow_the_count():
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
    # And down again where far too many pass.
    _, function = jitted("sidco", density=0.01, period=1)
    crowded = np.where(np.arange(100_000) % 10 == 0, 1, 1e-6).astype(np.float32)
    state = SIDCoState(state.count, jnp.int32(3), jnp.float32(0))
    for expected in (2, 1, 1):
        _, state, _ = function(crowded, state)
        assert int(state.stages) == expected


# In float16.

TINY, TWO, HUGE = np.float16(2**-24), np.float16(2), np.finfo(np.float16).max


def float16_vectors():
    """Hard vectors by name: those of float32, rounded, and those at the ends of float16."""
    with np.errstate(over="ignore"):
        vectors = {name: x.astype(np.float16) for name, x in hard_vectors(SMALL).items()}
    integers = np.random.default_rng(0).integers(-3, 4, SMALL).astype(np.float16)
    return vectors | {
        "smallest of float16": integers * TINY,
        # The sum and the squares do not fit a float16.
        "largest of float16": np.where(np.arange(SMALL) % 3, HUGE, -HUGE) / np.float16(2)
        + integers,
    }


@pytest.mark.parametrize("name", slow_but(OF_FLOAT16.keys() - {"dgc"}, OF_FLOAT16))
def test_float16_step_after_step(name):
    follow(name, float16_vectors(), K / SMALL)


@pytest.mark.parametrize("name", slow_but(OF_FLOAT16.keys() - {"dgc"}, OF_FLOAT16))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_select_what_float32_does(name, dtype):
    selector, function = made(name, K / SMALL)
    acc = as_dtype(laplace(SMALL), dtype)
    coo, _, info = out = function(acc, selector.init(SMALL))
    check(name, out, acc)
    # Exact values: the same entries of the same magnitudes.
    wide, _, wide_info = function(acc.astype(np.float32), selector.init(SMALL))
    np.testing.assert_array_equal(coo.indices, wide.indices)
    np.testing.assert_array_equal(np.asarray(coo.values, np.float32), wide.values)
    assert float(info.threshold) == pytest.approx(float(wide_info.threshold), rel=1e-6)


@pytest.mark.parametrize("label", ["normal", "half zeros", "largest of float16"])
def test_float16_thresholds_against_numpy(label):
    acc = float16_vectors()[label]
    expected = {
        "gaussian_k": estimators.gaussian_k(acc, K),
        "redsync": estimators.redsync(acc, K),
        "sidco exponential": estimators.sidco(acc, K, "exponential", 1),
        "threshold_reuse": selection.kth_magnitude(acc, K),
    }
    for name, threshold in expected.items():
        selector, function = made(name, K / SMALL)
        _, _, info = function(acc, selector.init(SMALL))
        assert float(info.threshold) == pytest.approx(threshold, rel=1e-4), name


@pytest.mark.slow
def test_dgc_of_a_random_sample_is_eagerly_what_it_is_compiled():
    selector, function = made("dgc", K / SMALL)
    # A random sample, and not all entries.
    assert 64 * SMALL / K < SMALL
    acc, state = laplace(SMALL, 1), selector.init(SMALL)
    for _ in range(2):
        eager, out = selector.select(jnp.asarray(acc), state), function(acc, state)
        jax.tree.map(np.testing.assert_array_equal, eager, out)
        state = out[1]
