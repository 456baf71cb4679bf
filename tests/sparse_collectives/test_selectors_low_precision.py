"""The selectors that estimate a threshold, on float16, and DGC run eagerly."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_collectives import select
from tests import jax_internals
from tests.reference import estimators, selection
from tests.sparse_collectives.helpers import slow_but

SIZE, K = 1003, 100
DENSITY = K / SIZE
# Slots, as a multiple of k.
SELECTORS = {
    "gaussian_k": (select.gaussian_k, 1.25),
    "gaussian_k adjusted": (functools.partial(select.gaussian_k, adjust=True), 1.25),
    "redsync": (select.redsync, 2.0),
    "sidco": (select.sidco, 1.25),
    "dgc": (select.dgc, 1.0),
    "threshold_reuse": (select.threshold_reuse, 1.25),
}
TINY, HUGE = np.float16(2**-24), np.finfo(np.float16).max


def float16_vectors():
    """Hard vectors by name: those of float32, rounded, and those at the ends of float16."""
    with np.errstate(over="ignore"):
        vectors = {name: x.astype(np.float16) for name, x in selection.hard_vectors(SIZE).items()}
    integers = np.random.default_rng(0).integers(-3, 4, SIZE).astype(np.float16)
    return vectors | {
        "smallest of float16": integers * TINY,
        # The sum and the squares do not fit a float16.
        "largest of float16": np.where(np.arange(SIZE) % 3, HUGE, -HUGE) / np.float16(2) + integers,
    }


@functools.cache
def compiled(name):
    factory, _ = SELECTORS[name]
    selector = factory(density=DENSITY)
    return selector, jax.jit(selector.select)


def check(out, acc, capacity):
    """What holds for every selection; returns the selected indices."""
    coo, _, info = out
    assert (coo.values.dtype, info.threshold.dtype) == (acc.dtype, jnp.float32)
    assert coo.indices.shape == coo.values.shape == (capacity,)
    indices, values, used = np.asarray(coo.indices), np.asarray(coo.values), int(info.selected)
    assert (indices[used:] == acc.size).all()
    assert not values[used:].view(np.uint16).any()
    indices = indices[:used]
    assert (np.diff(indices) > 0).all()
    np.testing.assert_array_equal(values[:used].view(np.uint16), acc[indices].view(np.uint16))
    passed = selection.passing(acc, float(info.threshold))
    assert used == min(len(passed), capacity)
    assert info.overflow == len(passed) - used
    assert np.isin(indices, passed).all()
    return indices


@pytest.fixture(params=SELECTORS)
def name(request):
    return request.param


@pytest.mark.parametrize("name", slow_but(SELECTORS.keys() - {"dgc"}, SELECTORS))
def test_float16_step_after_step(name):
    selector, function = compiled(name)
    capacity = math.ceil(SELECTORS[name][1] * K)
    state = selector.init(SIZE)
    for label, acc in float16_vectors().items():
        out = function(acc, state)
        indices = check(out, acc, capacity)
        state = out[1]
        # Two may find nothing: a sample without a hit, and a threshold of the step before.
        if name not in ("dgc", "threshold_reuse"):
            assert len(indices) >= min(1, np.count_nonzero(acc)), label
    assert jax_internals.programs(function) == 1


@pytest.mark.parametrize("name", slow_but(SELECTORS.keys() - {"dgc"}, SELECTORS))
def test_float16_selects_what_float32_does(name):
    selector, function = compiled(name)
    acc = np.random.default_rng(0).laplace(size=SIZE).astype(np.float16)
    coo, _, info = function(acc, selector.init(SIZE))
    # Exact values: the same entries of the same magnitudes.
    wide, _, wide_info = jax.jit(selector.select)(acc.astype(np.float32), selector.init(SIZE))
    np.testing.assert_array_equal(coo.indices, wide.indices)
    np.testing.assert_array_equal(coo.values.astype(np.float32), wide.values)
    assert float(info.threshold) == pytest.approx(float(wide_info.threshold), rel=1e-6)


@pytest.mark.parametrize("label", ["normal", "half zeros", "largest of float16"])
def test_float16_thresholds_against_numpy(label):
    acc = float16_vectors()[label]
    expected = {
        "gaussian_k": estimators.gaussian_k(acc, K),
        "redsync": estimators.redsync(acc, K),
        "sidco": estimators.sidco(acc, K, "exponential", 1),
        "threshold_reuse": selection.kth_magnitude(acc, K),
    }
    for name, threshold in expected.items():
        selector, function = compiled(name)
        _, _, info = function(acc, selector.init(SIZE))
        assert float(info.threshold) == pytest.approx(threshold, rel=1e-4), name


@pytest.mark.slow
def test_dgc_eagerly_is_dgc_compiled():
    selector, function = compiled("dgc")
    # A random sample, and not all entries.
    assert 64 * SIZE / K < SIZE
    acc = np.random.default_rng(1).laplace(size=SIZE).astype(np.float32)
    state = selector.init(SIZE)
    for _ in range(2):
        eager, out = selector.select(jnp.asarray(acc), state), function(acc, state)
        for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(out), strict=True):
            np.testing.assert_array_equal(a, b)
        state = out[1]
