"""Exact top-k against NumPy, cold, warm, and misled by its guess or its sample."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_collectives._sparse_ops import _kth_magnitude
from tests.reference import selection
from tests.sparse_collectives.helpers import slow, slow_rows
from tests.sparse_collectives.selecting import (
    DTYPES,
    LARGE,
    SMALL,
    as_dtype,
    assert_same_bits,
    check,
    hard_vectors,
    jitted,
    k_of,
)

DENSITY, K = 0.01, 1400
MISLEADING = ("only in the sample", "only beside the sample")
topk = functools.partial(jitted, "topk")


def check_topk(out, acc, k):
    indices = check(out, acc, k)
    np.testing.assert_array_equal(indices, selection.topk(acc, k))
    _, state, info = out
    assert info.overflow == 0
    np.testing.assert_array_equal(info.threshold, np.float32(selection.kth_magnitude(acc, k)))
    assert (state.shape, state.dtype) == ((), np.float32)
    # The next step always starts from a magnitude.
    assert np.isfinite(state)
    assert state >= 0
    return state


def steps_of(accs, density=DENSITY, state=0.0):
    """Checks step after step, each from the state of the one before."""
    state = np.float32(state)
    for acc in accs:
        state = check_topk(topk(density=density)[1](acc, state), acc, k_of(density, acc.size))


def misleading(kind, seed=0):
    """Large values only at sampled places, or only at the others."""
    stride, _, _ = _kth_magnitude._plan(LARGE, K)
    looked_at = np.arange(LARGE) % stride == 0
    scale = np.where(looked_at == (kind == "only in the sample"), 1, 1e-4)
    return (scale * selection.hard_vector("normal", LARGE, seed)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [1e-9, 0.1, 0.5, 1 - 1 / SMALL, 1.0])
@pytest.mark.one_in(3)
def test_small_vectors_are_exact(dtype, density):
    steps_of([as_dtype(x, dtype) for x in hard_vectors(SMALL).values()], density)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(selection.HARD_NAMES),
    st.integers(0, 2**32 - 1),
    st.one_of(st.floats(width=32), st.floats(0, 8, width=32)),
    # One word of a bit mask, one bit less or more, and many words with a rest.
    st.sampled_from([(size, d) for size in (1, 5, 31, 32, 33, SMALL) for d in (1e-9, 1 / 3, 1.0)]),
)
def test_vectors_by_seed_and_guess_are_exact(name, seed, guess, small):
    steps_of([selection.hard_vector(name, LARGE, seed)], state=guess)
    steps_of([selection.hard_vector(name, small[0], seed)], small[1])


@pytest.mark.parametrize(
    ("dtype", "density"),
    [
        ("float32", DENSITY),
        *slow_rows(*((dtype, DENSITY) for dtype in DTYPES[1:])),
        *slow_rows(*(("float32", density) for density in (0.4, 1e-9, 1.0))),
    ],
)
@pytest.mark.slow
def test_large_vectors_are_exact_cold_and_warm(dtype, density):
    for x in hard_vectors(LARGE).values():
        steps_of([as_dtype(x, dtype)] * 2, density)
    steps_of([as_dtype(x, dtype) for x in hard_vectors(LARGE).values()], density)


@pytest.mark.parametrize("name", ["normal", "ties at the top", "few nonzeros", "not finite"])
def test_guess_that_is_wrong_changes_nothing(name):
    for guess in (1e-45, 1e-30, 0.5, 1e3, 1e30, math.inf, math.nan, -1.0, -math.inf):
        steps_of([hard_vectors(LARGE)[name]] * 2, state=guess)


@pytest.mark.parametrize("kind", MISLEADING)
def test_sample_that_misleads_changes_nothing(kind):
    for guess in (0.0, 1e9):
        steps_of([misleading(kind)], state=guess)
    stride, _, _ = _kth_magnitude._plan(LARGE, K)
    ties = np.where(np.arange(LARGE) % stride == 0, 0, np.arange(LARGE) % 997)
    steps_of([ties.astype(np.float32)])


@pytest.mark.parametrize("size", [SMALL, *slow(LARGE)])
def test_vmap_gives_the_same_bits_whether_a_lane_falls_back_or_not(size):
    density = DENSITY if size == LARGE else 0.1
    lanes = [hard_vectors(size)[name] for name in ("normal", "few nonzeros", "not finite")]
    lanes += [misleading(kind)[:size] for kind in MISLEADING]
    # Some lanes' guesses fit; the others fail upwards, downwards or without a guess.
    guesses = np.array([2.5, 1e9, 1e-9, 0, math.nan], np.float32)
    selector, select = topk(density=density)
    batched = jax.jit(jax.vmap(selector.select))(np.stack(lanes), guesses)
    for lane, (acc, guess) in enumerate(zip(lanes, guesses, strict=True)):
        coo, _, info = select(acc, guess)
        of_lane = jax.tree.map(lambda leaf, lane=lane: leaf[lane], batched)
        assert_same_bits((of_lane[0], of_lane[2]), (coo, info))


def test_few_are_candidates_where_the_data_do_not_conspire():
    """At least k and not too many, from the step before and from the sample."""
    _, state, _ = topk(density=DENSITY)[1](hard_vectors(LARGE)["normal"], np.float32(0))
    other = selection.hard_vector("normal", LARGE, seed=5)
    assert K <= len(selection.passing(other, float(state))) <= 1.4 * K
    sampled = jax.jit(functools.partial(_kth_magnitude.sampled_magnitude_bits, k=K))
    _, _, capacity = _kth_magnitude._plan(LARGE, K)

    def fits(x):
        found = selection.passing(x, float(np.asarray(sampled(x)).view(np.float32)))
        return K <= len(found) <= capacity

    for name in ("normal", "heavy tail", "ascending", "half zeros"):
        assert all(fits(selection.hard_vector(name, LARGE, seed)) for seed in range(3))
    assert not any(fits(misleading(kind)) for kind in MISLEADING)
