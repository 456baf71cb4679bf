"""Raw pairs arrive bit for bit, gaps where there is room, and random rounding has its mean."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_collectives as sc
from tests.sparse_collectives.helpers import slow_but

LARGEST = 2**31 - 1
SLOTS = 24
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNSIGNED = {2: np.uint16, 4: np.uint32}
RAW = sc.wire.raw()
SEED = np.uint32(7)
encode = jax.jit(RAW.encode)
decode = jax.jit(RAW.decode, static_argnums=(1, 2))
encode_dense = jax.jit(RAW.encode_dense)
decode_dense = jax.jit(RAW.decode_dense, static_argnums=(1, 2))


def bits(values):
    values = np.asarray(values)
    return values.view(UNSIGNED[values.dtype.itemsize])


def any_coo(name, seed, shape):
    """Values of any bit pattern: NaN with payloads, infinities, subnormals, -0."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(DTYPES[name])
    unsigned = UNSIGNED[dtype.itemsize]
    patterns = rng.integers(0, np.iinfo(unsigned).max, shape, dtype=unsigned, endpoint=True)
    sign = unsigned(1 << (8 * dtype.itemsize - 1))
    special = rng.choice([0, 1, sign, sign + 1], shape)
    patterns = np.where(rng.random(shape) < 0.1, special, patterns).astype(unsigned)
    indices = rng.integers(0, LARGEST, shape, dtype=np.int32, endpoint=True)
    return sc.PaddedCOO(jnp.asarray(patterns.view(dtype)), jnp.asarray(indices), LARGEST)


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(64,), (1,), (7,), (3, 5), (2, 3, 4), (2, 0)]),
)
def test_raw_is_exact_for_every_bit_pattern_of_pairs_and_of_dense_values(name, seed, shape):
    coo = any_coo(name, seed, shape)
    message, sent, error = encode(coo, SEED)
    assert RAW.exact
    assert (message.dtype, message.shape) == (jnp.int32, (*shape[:-1], 2 * shape[-1]))
    decoded = decode(message, LARGEST, DTYPES[name])
    assert decoded.size == coo.size
    assert (decoded.values.dtype, decoded.indices.dtype) == (coo.values.dtype, jnp.int32)
    np.testing.assert_array_equal(bits(decoded.values), bits(coo.values))
    np.testing.assert_array_equal(decoded.indices, coo.indices)
    np.testing.assert_array_equal(sent, coo.indices < LARGEST)
    dense, dense_error = encode_dense(coo.values, SEED)
    words = -(-shape[-1] * coo.values.dtype.itemsize // 4)
    assert (dense.dtype, dense.shape) == (jnp.int32, (*shape[:-1], words))
    decoded = decode_dense(dense, shape[-1], DTYPES[name])
    np.testing.assert_array_equal(bits(decoded), bits(coo.values))
    for lost in (error, dense_error):
        assert lost.dtype == coo.values.dtype
        assert not bits(lost).any()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (1,), (7,), (2, 3, 4), (2, 0)])
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.one_in(2)
def test_elias_fano_is_exact_and_puts_indices_in_order(name, shape, ascending):
    codec, coo = sc.wire.elias_fano(), any_coo(name, 0, shape)
    indices = np.asarray(coo.indices)
    if ascending:
        coo = sc.PaddedCOO(coo.values, jnp.sort(coo.indices, axis=-1), coo.size)
        indices = np.asarray(coo.indices)
    message, sent, error = jax.jit(codec.encode)(coo, SEED)
    assert codec.exact
    assert np.asarray(sent).all()
    assert not bits(error).any()
    found = jax.jit(codec.decode, static_argnums=(1, 2))(message, LARGEST, DTYPES[name])
    assert found.indices.shape[-1] - shape[-1] in (0, 1)  # Two values of 16 bits fill a word.
    order = np.argsort(indices, axis=-1, kind="stable")
    np.testing.assert_array_equal(
        found.indices[..., : shape[-1]], np.take_along_axis(indices, order, axis=-1)
    )
    values = np.take_along_axis(bits(coo.values), order, axis=-1)
    np.testing.assert_array_equal(bits(found.values)[..., : shape[-1]], values)


def test_raw_keeps_subnormals_outside_of_jit():
    subnormals = np.array([1, 2, 0x8001], np.uint16).view(jnp.bfloat16)
    message, _ = RAW.encode_dense(jnp.asarray(subnormals), SEED)
    decoded = RAW.decode_dense(message, 3, jnp.bfloat16)
    np.testing.assert_array_equal(bits(decoded), bits(subnormals))


# Gaps with escapes: entries that do not fit are reported, and are not always the same.

GAPS = {
    "narrow16": sc.wire.narrow16(escapes=0.0),
    "narrow8": sc.wire.narrow8(escapes=0.0),
    "narrow16, room": sc.wire.narrow16(escapes=1.0),
}


@functools.cache
def round_trip(name):
    codec = GAPS[name]

    def there_and_back(values, indices, seed):
        encoded = codec.encode(sc.PaddedCOO(values, indices, LARGEST), seed)
        return encoded.sent, codec.decode(encoded.message, LARGEST, jnp.float32)

    return jax.jit(there_and_back)


def arrivals(name, indices, seed):
    indices = np.asarray(indices, np.int32)
    sent, decoded = round_trip(name)(np.ones(SLOTS, np.float32), indices, np.uint32(seed))
    got = np.asarray(decoded.indices)
    np.testing.assert_array_equal(got[got < LARGEST], indices[np.asarray(sent)])
    return np.asarray(sent)


@pytest.mark.parametrize("name", slow_but(("narrow16", "narrow16, room"), GAPS))
@settings(max_examples=100, deadline=None)
@given(
    indices=st.lists(
        st.one_of(
            st.integers(0, LARGEST),
            st.integers(0, 600),
            st.sampled_from([0, 252, 253, 254, 65534, 65535, 65536, 64768, LARGEST - 1]),
        ),
        min_size=SLOTS,
        max_size=SLOTS,
    ),
    ascending=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_indices_in_any_order(name, indices, ascending, seed):
    indices = sorted(indices) if ascending else indices
    sent = arrivals(name, indices, seed)
    used = np.asarray(indices) < LARGEST
    assert not (sent & ~used).any()
    if name == "narrow16, room" or used.sum() <= 6:
        np.testing.assert_array_equal(sent, used)
    # Each entry takes at most four slots, and six more are left out if some must be.
    assert sent.sum() >= min(used.sum(), SLOTS // 4 - 6)


@pytest.mark.parametrize("name", ["narrow16", "narrow8"])
def test_short_gaps_need_no_room_and_of_long_ones_none_waits_for_ever(name):
    assert arrivals(name, LARGEST - 1 - 252 * np.arange(SLOTS)[::-1], 0).all()
    indices = np.arange(SLOTS) * 70_000_000
    often = sum(arrivals(name, indices, seed).astype(int) for seed in range(200))
    assert often.min() >= 20


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (sc.wire.bf16(), 1.5),
        (sc.wire.narrow16(), 1 + 1 / 16),
        (sc.wire.narrow8(), (1 + 1 / 8) * (1 / 2 + 1 / 128)),
        (sc.wire.two_bits(), (1 + 1 / 16) * (14 / 32 + 1 / 128)),
        (sc.wire.two_bits(gap_bits=8), (1 + 1 / 16) * (10 / 32 + 1 / 128)),
        (sc.wire.qsgd(bits=4, bucket=512), 1 + 1 / 8 + 1 / 512),
    ],
)
def test_words_of_a_long_message(codec, words):
    shape = sc.PaddedCOO(
        jax.ShapeDtypeStruct((2, 100_000), jnp.float32),
        jax.ShapeDtypeStruct((2, 100_000), jnp.int32),
        LARGEST,
    )
    message = jax.eval_shape(codec.encode, shape, np.uint32(0)).message
    # Room for a few slots more, and the first index.
    assert message.shape[1] == pytest.approx(words * 100_000, abs=13)


def test_one_percent_at_random_fits_half_a_word():
    rng = np.random.default_rng(0)
    indices = np.sort(rng.choice(500_000, 5000, replace=False)).astype(np.int32)
    coo = sc.PaddedCOO(np.ones(5000, np.float32), indices, 500_000)
    assert np.asarray(jax.jit(sc.wire.narrow8().encode)(coo, np.uint32(0)).sent).all()


# Random rounding.

DRAWS, LENGTH = 10_000, 32
RANDOM = {
    "qsgd 2": sc.wire.qsgd(bits=2, bucket=16),
    "qsgd 4": sc.wire.qsgd(bits=4, bucket=16),
    "qsgd 8": sc.wire.qsgd(bits=8, bucket=16),
    "qsgd 4 l2": sc.wire.qsgd(bits=4, bucket=16, norm="l2"),
}
# Steps and positions by which two draws differ; a bucket has 16.
LAGS = [(0, 1), (1, 0), (1, 1), (0, 2), (16, 0), (0, 16)]


@pytest.mark.parametrize("name", RANDOM)
def test_the_mean_over_ten_thousand_draws_is_the_value(name):
    codec = RANDOM[name]
    rng = np.random.default_rng(0)
    values = rng.standard_normal(LENGTH).astype(np.float32)
    values[3], values[7] = 0, 1e-4
    index = np.arange(LENGTH, dtype=np.int32) * 5

    @jax.jit
    @jax.vmap
    def draw(seed):
        dense = codec.decode_dense(codec.encode_dense(values, seed)[0], LENGTH, jnp.float32)
        encoded = codec.encode(sc.PaddedCOO(jnp.asarray(values), jnp.asarray(index), 999), seed)
        pairs = codec.decode(encoded.message, 999, jnp.float32)
        place = jnp.where(pairs.indices < 999, pairs.indices // 5, LENGTH)
        sparse = jnp.zeros(LENGTH).at[place].set(pairs.values, mode="drop")
        return dense, sparse, encoded.error

    dense, sparse, error = (
        np.asarray(x, np.float64) for x in draw(np.arange(DRAWS, dtype=np.uint32))
    )
    for drawn in (dense, sparse):
        spread = drawn.std(axis=0)
        # A small value is nearly always rounded to zero, so its expected spread is used.
        expected = np.where(np.abs(values) < 0.01, np.sqrt(np.abs(values) * 3), spread)
        bound = 5 * expected / np.sqrt(DRAWS) + 2e-6 * np.abs(values).max()
        assert (np.abs(drawn.mean(axis=0) - values) <= bound).all()
        assert spread[np.abs(values) > 0.01].max() > 0
        # Two levels at most, one on each side.
        assert max(len(np.unique(column)) for column in drawn.T) == 2
        # The errors of neighbors are not correlated.
        varied = drawn[:, spread > 0.05 * spread.max()]
        centred = (varied - varied.mean(axis=0)) / varied.std(axis=0)
        for steps, places in LAGS:
            earlier = centred[: DRAWS - steps, : centred.shape[1] - places]
            products = (earlier * centred[steps:, places:]).mean(axis=0)
            assert np.abs(products).max() < 5 / np.sqrt(DRAWS)
    np.testing.assert_allclose(sparse + error, np.broadcast_to(values, sparse.shape), atol=1e-6)
