"""What is decoded is what was encoded, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_collectives as sc

SIZE = 2**31 - 1
CAPACITY = 64
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNSIGNED = {2: np.uint16, 4: np.uint32}
RAW = sc.wire.raw()

SEED = np.uint32(7)
encode = jax.jit(lambda coo: RAW.encode(coo, SEED).message)
decode = jax.jit(RAW.decode, static_argnums=(1, 2))


def bits(values):
    values = np.asarray(values)
    return values.view(UNSIGNED[values.dtype.itemsize])


def any_coo(name, seed, shape=(CAPACITY,)):
    """Values of any bit pattern: NaN with payloads, infinities, subnormals, -0."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(DTYPES[name])
    unsigned = UNSIGNED[dtype.itemsize]
    patterns = rng.integers(0, np.iinfo(unsigned).max, shape, dtype=unsigned, endpoint=True)
    sign = unsigned(1 << (8 * dtype.itemsize - 1))
    patterns = np.where(
        rng.random(shape) < 0.1, rng.choice([0, 1, sign, sign + 1], shape), patterns
    )
    indices = rng.integers(0, SIZE, shape, dtype=np.int32, endpoint=True)
    return sc.PaddedCOO(
        jnp.asarray(patterns.astype(unsigned).view(dtype)), jnp.asarray(indices), SIZE
    )


def assert_same_bits(left, right):
    assert left.size == right.size
    assert left.values.dtype == right.values.dtype
    assert left.indices.dtype == right.indices.dtype
    np.testing.assert_array_equal(bits(left.values), bits(right.values))
    np.testing.assert_array_equal(left.indices, right.indices)


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_raw_is_exact_for_every_bit_pattern(name, seed):
    coo = any_coo(name, seed)
    words = encode(coo)
    assert words.dtype == jnp.int32
    assert words.shape == (2 * CAPACITY,)
    assert_same_bits(decode(words, SIZE, DTYPES[name]), coo)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_raw_is_exact_for_all_sixteen_bit_values(name):
    values = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name])
    coo = sc.PaddedCOO(jnp.asarray(values), jnp.arange(1 << 16, dtype=jnp.int32), 1 << 16)
    assert_same_bits(RAW.decode(encode(coo), 1 << 16, DTYPES[name]), coo)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4), (2, 0), (0, 7)])
def test_leading_dimensions_stay(name, shape):
    coo = any_coo(name, 0, shape)
    words = encode(coo)
    assert words.shape == (*shape[:-1], 2 * shape[-1])
    assert_same_bits(RAW.decode(words, SIZE, DTYPES[name]), coo)


def test_rows_are_encoded_by_themselves():
    coo = any_coo("float32", 1, (4, 6))
    by_row = jax.vmap(encode)(coo)
    np.testing.assert_array_equal(by_row, encode(coo))
    # A row of the words alone, as after an exchange.
    row = RAW.decode(by_row[2], SIZE, jnp.float32)
    assert_same_bits(row, jax.tree.map(lambda leaf: leaf[2], coo))


@pytest.mark.parametrize("name", DTYPES)
def test_an_exact_codec_reports_no_error(name):
    coo = sc.PaddedCOO(any_coo(name, 3).values, jnp.arange(CAPACITY, dtype=jnp.int32), 50)
    encoded = RAW.encode(coo, SEED)
    assert RAW.exact
    np.testing.assert_array_equal(encoded.sent, np.arange(CAPACITY) < 50)
    assert not bits(encoded.error).any()
    assert encoded.error.dtype == coo.values.dtype


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (3, 5), (2, 0)])
def test_dense_values_are_exact(name, shape):
    values = any_coo(name, 4, shape).values
    message, error = RAW.encode_dense(values, SEED)
    assert message.dtype == jnp.int32
    assert message.shape == (*shape[:-1], -(-shape[-1] * values.dtype.itemsize // 4))
    decoded = RAW.decode_dense(message, shape[-1], DTYPES[name])
    np.testing.assert_array_equal(bits(decoded), bits(values))
    assert not bits(error).any()
