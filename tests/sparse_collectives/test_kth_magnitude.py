"""The k-th magnitude against np.partition, also where the sample misleads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_collectives._coo import _bits, kth_magnitude
from tests.reference import selection

SMALL = 1000
LARGE = kth_magnitude.DIRECT_SIZE + 1
K = 1310


@functools.cache
def kth(k, batched=False):
    function = functools.partial(kth_magnitude.kth_magnitude_bits, k=k)
    return jax.jit(jax.vmap(function) if batched else function)


@functools.cache
def sampled(k):
    return jax.jit(functools.partial(kth_magnitude.sampled_magnitude_bits, k=k))


def as_magnitude(bits):
    assert bits.dtype == jnp.int32
    return np.asarray(bits).view(np.float32)


def sample_hits(x, k):
    """Whether the sample gives at least k candidates, and not too many."""
    _, _, capacity = kth_magnitude._plan(x.size, k)
    low = float(as_magnitude(sampled(k)(x)))
    return k <= len(selection.passing(x, low)) <= capacity


def misleading(kind, size, k):
    """Large values only where the sample looks, or only where it does not."""
    stride, _, _ = kth_magnitude._plan(size, k)
    assert stride > 1
    looked_at = np.arange(size) % stride == 0
    rng = np.random.default_rng(1)
    scale = np.where(looked_at == (kind == "only in the sample"), 1.0, 1e-4)
    return (scale * rng.standard_normal(size)).astype(np.float32)


@pytest.mark.parametrize("k", [1, 2, 100, SMALL - 1, SMALL])
@pytest.mark.parametrize("name", selection.HARD_NAMES)
def test_small_vectors(name, k):
    x = selection.hard_vector(name, SMALL)
    np.testing.assert_array_equal(as_magnitude(kth(k)(x)), selection.kth_magnitude(x, k))


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(selection.HARD_NAMES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 100, SMALL]),
)
def test_small_vectors_by_seed(name, seed, k):
    x = selection.hard_vector(name, SMALL, seed)
    np.testing.assert_array_equal(as_magnitude(kth(k)(x)), selection.kth_magnitude(x, k))


def test_one_entry():
    assert as_magnitude(kth(1)(np.array([-3.5], np.float32))) == 3.5


@pytest.mark.parametrize("k", [1, K, LARGE])
@pytest.mark.parametrize("name", selection.HARD_NAMES)
def test_large_vectors(name, k):
    x = selection.hard_vector(name, LARGE)
    np.testing.assert_array_equal(as_magnitude(kth(k)(x)), selection.kth_magnitude(x, k))


def test_the_sample_hits_where_the_data_do_not_conspire():
    for name in ("normal", "heavy tail", "ascending", "half zeros"):
        for seed in range(3):
            assert sample_hits(selection.hard_vector(name, LARGE, seed), K)


@pytest.mark.parametrize("kind", ["only in the sample", "only beside the sample"])
def test_a_misleading_sample_changes_nothing(kind):
    x = misleading(kind, LARGE, K)
    assert not sample_hits(x, K)
    np.testing.assert_array_equal(as_magnitude(kth(K)(x)), selection.kth_magnitude(x, K))


@pytest.mark.parametrize("k", [1, K])
def test_all_large_values_beside_the_sample(k):
    stride, _, _ = kth_magnitude._plan(LARGE, K)
    x = np.where(np.arange(LARGE) % stride == 0, 0, np.arange(LARGE) % 997).astype(np.float32)
    np.testing.assert_array_equal(as_magnitude(kth(k)(x)), selection.kth_magnitude(x, k))


def test_vmap_gives_the_same_whether_a_lane_falls_back_or_not():
    lanes = np.stack(
        [
            selection.hard_vector("normal", LARGE),
            misleading("only in the sample", LARGE, K),
            misleading("only beside the sample", LARGE, K),
            selection.hard_vector("few nonzeros", LARGE),
        ]
    )
    expected = [selection.kth_magnitude(x, K) for x in lanes]
    np.testing.assert_array_equal(as_magnitude(kth(K, batched=True)(lanes)), expected)


def test_vmap_of_small_vectors():
    lanes = np.stack(list(selection.hard_vectors(SMALL).values()))
    expected = [selection.kth_magnitude(x, 100) for x in lanes]
    np.testing.assert_array_equal(as_magnitude(kth(100, batched=True)(lanes)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_sixteen_bit_values(dtype, size):
    k = size // 100
    for name in ("normal", "all equal", "subnormal", "not finite"):
        x = np.asarray(jnp.asarray(selection.hard_vector(name, size), dtype))
        np.testing.assert_array_equal(as_magnitude(kth(k)(x)), selection.kth_magnitude(x, k), name)


@pytest.mark.parametrize("size", [1 << 17, 10**6, 16 * 10**6, 2**31 - 1])
@pytest.mark.parametrize("density", [1e-6, 1e-4, 0.01, 0.1, 1.0])
def test_the_plan_stays_in_range(size, density):
    k = max(1, round(density * size))
    stride, rank, capacity = kth_magnitude._plan(size, k)
    samples = -(-size // stride)
    assert stride % 2 == 1
    assert 1 <= rank <= samples
    assert capacity >= min(k, size // 2)
    # A rank that leaves room below and above it.
    expected = k * samples / size
    assert rank >= min(samples, expected + 4 * expected**0.5)


def test_bisect_finds_the_largest_pattern_that_enough_entries_reach():
    bits = _bits.magnitude_bits(jnp.asarray(selection.hard_vector("all magnitudes", SMALL)))
    ordered = np.sort(np.asarray(bits))[::-1]
    ranks = np.array([1, 2, 17, 500, 999, 1000], np.int32)
    found = jax.vmap(kth_magnitude.bisect, in_axes=(None, 0))(bits, jnp.asarray(ranks))
    np.testing.assert_array_equal(found, ordered[ranks - 1])
