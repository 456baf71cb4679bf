"""Magnitudes order as numbers do, and the bit tricks agree with NumPy's."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_collectives._coo import _bits

# A bfloat16 and a float16 have only 65,536 patterns: all of them are tested.
ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)
SIXTEEN_BIT = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
WORDS = 64

magnitude_bits = jax.jit(_bits.magnitude_bits)
magnitude_from_bits = jax.jit(_bits.magnitude_from_bits)
pack_mask = jax.jit(_bits.pack_mask)
popcount = jax.jit(_bits.popcount)
select_bit = jax.jit(_bits.select_bit)

words_strategy = st.lists(
    st.one_of(
        st.integers(0, 2**32 - 1),
        st.sampled_from([0, 1, 1 << 31, 2**32 - 1, 0x80000001, 0xAAAAAAAA, 0xFFFF0000, 0x0000FFFF]),
        st.integers(0, 31).map(lambda bit: 1 << bit),
    ),
    min_size=WORDS,
    max_size=WORDS,
).map(lambda words: np.array(words, np.uint32))


def float32_from_bits(patterns):
    return np.asarray(patterns, np.uint32).view(np.float32)


@pytest.mark.parametrize("words", [1, 2, 33])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_pack_mask_puts_entry_b_of_a_word_into_bit_b(words, share):
    mask = np.random.default_rng(words).random(32 * words) < share
    expected = np.packbits(mask, bitorder="little").view("<u4")
    for function in (_bits.pack_mask, pack_mask):
        packed = function(jnp.asarray(mask))
        assert packed.dtype == jnp.uint32
        np.testing.assert_array_equal(packed, expected)


def test_pack_mask_of_each_single_entry():
    masks = np.eye(32, dtype=bool)
    packed = jax.vmap(_bits.pack_mask)(jnp.asarray(masks))
    np.testing.assert_array_equal(packed[:, 0], np.uint32(1) << np.arange(32, dtype=np.uint32))


@settings(max_examples=50, deadline=None)
@given(words_strategy)
def test_popcount_counts_the_set_bits(words):
    counts = popcount(words)
    assert counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts, [int(word).bit_count() for word in words])


@settings(max_examples=50, deadline=None)
@given(words_strategy)
def test_select_bit_finds_every_set_bit_of_every_word(words):
    ranks = np.broadcast_to(np.arange(32, dtype=np.int32), (WORDS, 32))
    positions = np.asarray(select_bit(np.repeat(words[:, None], 32, axis=1), ranks))
    assert positions.dtype == np.int32
    assert ((positions >= 0) & (positions < 32)).all()
    for word, found in zip(words, positions):
        expected = [bit for bit in range(32) if int(word) >> bit & 1]
        assert found[: len(expected)].tolist() == expected


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=64, max_size=64),
    st.integers(0, 2**32 - 1),
)
def test_magnitudes_order_as_numbers_do(values, seed):
    values = np.array(values, np.float32)
    # Neighbors too: a pattern and the next one.
    patterns = np.random.default_rng(seed).integers(0, 0x7F800000, 32).astype(np.uint32)
    x = np.concatenate([values, float32_from_bits(patterns), float32_from_bits(patterns + 1)])
    bits = np.asarray(magnitude_bits(x))
    assert bits.dtype == np.int32
    exact = np.abs(x.astype(np.float64))
    np.testing.assert_array_equal(bits[:, None] < bits, exact[:, None] < exact)
    np.testing.assert_array_equal(bits[:, None] == bits, exact[:, None] == exact)


def test_subnormals_keep_their_order_and_negative_zero_is_zero():
    patterns = np.array([0, 1, 2, 3, 0x007FFFFF, 0x00800000], np.uint32)
    for sign in (0, 1 << 31):
        for function in (_bits.magnitude_bits, magnitude_bits):
            bits = function(jnp.asarray(float32_from_bits(patterns | np.uint32(sign))))
            assert np.asarray(bits).tolist() == patterns.tolist()


def test_every_nan_is_above_infinity():
    nans = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF]
    infinity, negative_infinity, *bits = np.asarray(
        magnitude_bits(float32_from_bits([0x7F800000, 0xFF800000, *nans]))
    ).tolist()
    assert infinity == negative_infinity
    assert min(bits) > infinity


@pytest.mark.parametrize("name", SIXTEEN_BIT)
@pytest.mark.parametrize("function", [_bits.magnitude_bits, magnitude_bits])
def test_all_sixteen_bit_values_order_as_numbers_do(name, function):
    x = ALL_PATTERNS.view(SIXTEEN_BIT[name])
    with np.errstate(invalid="ignore"):  # A cast of a signaling NaN.
        exact = np.abs(x.astype(np.float64))
    bits = np.asarray(function(jnp.asarray(x)))
    assert bits.dtype == np.int32
    nan = np.isnan(exact)
    assert bits[nan].min() > bits[~nan].max()
    exact = np.where(np.isinf(exact), 1e300, exact)[~nan]
    order = np.argsort(exact)
    steps = np.diff(exact[order])
    np.testing.assert_array_equal(np.sign(np.diff(bits[~nan][order])), np.sign(steps))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=WORDS, max_size=WORDS))
def test_magnitude_from_bits_is_the_inverse(patterns):
    bits = np.array(patterns, np.int32)
    values = magnitude_from_bits(bits)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(values).view(np.int32), bits)
    np.testing.assert_array_equal(magnitude_bits(values), bits)
    np.testing.assert_array_equal(magnitude_bits(-values), bits)
