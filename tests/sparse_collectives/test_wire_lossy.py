"""Lossy codecs: their formats, and their reported errors."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_collectives as sc
from tests.reference import wire as oracle
from tests.sparse_collectives.helpers import slow_but

LARGEST = 2**31 - 1
SLOTS, ROWS = 70, 3
WIRE = sc.wire

# name: (codec, its decoder for pairs, and its decoder for dense runs).
CODECS = {
    "bf16": (WIRE.bf16(), oracle.bf16, None),
    "narrow16": (WIRE.narrow16(), oracle.narrow16, None),
    "narrow8": (
        WIRE.narrow8(block=32),
        functools.partial(oracle.narrow8, block=32),
        functools.partial(oracle.dense8, block=32),
    ),
    **{
        f"two_bits {bits}": (
            WIRE.two_bits(gap_bits=bits, block=32, escapes=1 / 8),
            functools.partial(oracle.two_bits, gap_bits=bits, block=32),
            oracle.dense8,
        )
        for bits in (8, 12)
    },
    **{
        f"qsgd {bits} {norm}": (
            WIRE.qsgd(bits=bits, bucket=32, norm=norm),
            functools.partial(oracle.qsgd, bits=bits, bucket=32),
            functools.partial(oracle.dense_qsgd, bits=bits, bucket=32),
        )
        for bits, norm in ((2, "max"), (4, "l2"), (8, "max"))
    },
}
# They leave out zeros, and values far below most of their neighbors.
WAITING = ("two_bits 8", "two_bits 12")
OF_GAPS = ("narrow16", "narrow8")
EVERY = {name: codec for name, (codec, *_) in CODECS.items()} | {"raw": WIRE.raw()}


@functools.cache
def jitted(name, kind=""):
    encode, decode = (getattr(EVERY[name], way + kind) for way in ("encode", "decode"))
    return jax.jit(encode), jax.jit(decode, static_argnums=(1, 2))


jitted_dense = functools.partial(jitted, kind="_dense")


def any_values(rng, shape):
    """Values of one magnitude, with heavy tails, of any bit pattern, with zeros, or equal."""
    kind = rng.integers(5)
    normal = rng.standard_normal(shape)
    patterns = rng.integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        return (
            normal,
            rng.standard_cauchy(shape) * 10.0 ** rng.integers(-30, 30),
            patterns.view(np.float32),
            np.where(rng.random(shape) < 0.3, 0, normal) * rng.choice([1, -1]),
            np.full(shape, rng.standard_normal()),
        )[kind].astype(np.float32)


def any_coo(rng, size):
    """Ascending indices with gaps of any length; padding last, or anywhere."""
    longest = min(size // SLOTS, 10 ** rng.integers(0, 10))
    gaps = rng.integers(1, longest, (ROWS, SLOTS), endpoint=True)
    gaps[:, 0] -= 1
    indices = np.cumsum(gaps, axis=1)
    slot = np.arange(SLOTS)
    unused = (slot >= rng.integers(0, SLOTS + 1), rng.random((ROWS, SLOTS)) < 0.2)
    indices = np.where(unused[rng.integers(2)], size, indices).astype(np.int32)
    values = np.where(indices < size, any_values(rng, indices.shape), 0)
    return sc.PaddedCOO(values, indices, size)


def check_conserved(values, decoded, error):
    """Value = decoded + error up to rounding; non-finite values arrive as such."""
    finite = np.isfinite(values)
    assert (np.isfinite(decoded) == finite).all()
    assert (error[~finite] == 0).all()
    values, decoded, error = (x[finite].astype(np.float64) for x in (values, decoded, error))
    scale = np.maximum(np.abs(values), np.abs(decoded))
    assert (np.abs(values - decoded - error) <= 2.0**-23 * scale).all()


def same(left, right):
    """Equal, and NaN equals NaN of any payload."""
    left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", slow_but(CODECS.keys() - set(OF_GAPS), CODECS))
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([5000, LARGEST]))
@pytest.mark.one_in(3)
def test_pairs_arrive_as_the_format_says_and_nothing_is_lost(name, seed, size):
    rng = np.random.default_rng(seed)
    coo = any_coo(rng, size)
    encode, decode = jitted(name)
    message, sent, error = map(np.asarray, encode(coo, np.uint32(seed)))
    assert message.dtype == np.int32
    decoded = decode(message, size, jnp.float32)
    assert decoded.indices.shape[-1] >= SLOTS
    assert not (sent & (coo.indices == size)).any()
    assert (error[~sent] == 0).all()
    if size < 2**16 and not name.startswith(("narrow8", *WAITING)):
        assert (sent == (coo.indices < size)).all()
    for row in range(ROWS):
        entries = CODECS[name][1](message[row], size)
        arrived = np.asarray(decoded.indices[row]) < size
        indices = np.asarray(decoded.indices[row])[arrived]
        values = np.asarray(decoded.values[row])[arrived]
        assert (np.asarray(decoded.values[row])[~arrived] == 0).all()
        assert indices.tolist() == [index for index, _ in entries]
        same(values, [value for _, value in entries])
        np.testing.assert_array_equal(indices, coo.indices[row][sent[row]])
        check_conserved(coo.values[row][sent[row]], values, error[row][sent[row]])


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_dense_runs_arrive_as_the_format_says(name, seed):
    decoder = CODECS[name][2]
    encode, decode = jitted_dense(name)
    rng = np.random.default_rng(seed)
    values = any_values(rng, (2, 75))
    message, error = map(np.asarray, encode(values, np.uint32(seed)))
    decoded = np.asarray(decode(message, 75, jnp.float32))
    assert decoded.shape == values.shape
    for row in range(2):
        if decoder is not None:
            same(decoded[row], decoder(message[row], 75))
        check_conserved(values[row], decoded[row], error[row])


def test_errors_of_eight_bits_are_relative():
    rng = np.random.default_rng(0)
    values = rng.standard_t(3, (ROWS, SLOTS)).astype(np.float32)
    indices = np.tile(np.arange(SLOTS, dtype=np.int32), (ROWS, 1))
    coo = sc.PaddedCOO(values, indices, 5000)
    error = np.asarray(jitted("narrow8")[0](coo, np.uint32(0)).error)
    assert (np.abs(error) <= 0.065 * np.abs(values)).all()
    assert np.abs(error).max() > 0


@pytest.mark.parametrize("name", WAITING)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_two_bits_error_is_not_larger_than_its_value(name, seed):
    rng = np.random.default_rng(seed)
    values = any_values(rng, (ROWS, SLOTS))
    values = np.where(np.isfinite(values), values, 1).astype(np.float32)
    coo = sc.PaddedCOO(values, np.tile(np.arange(SLOTS, dtype=np.int32), (ROWS, 1)), 5000)
    error = np.asarray(jitted(name)[0](coo, np.uint32(0)).error)
    assert (np.abs(error) <= np.abs(values)).all()


def test_two_bits_take_a_hundredth_of_the_square_of_what_a_selection_has():
    values = np.sort(np.abs(np.random.default_rng(0).standard_normal(100_000)))[-1000:]
    values = np.random.default_rng(1).permutation(values).astype(np.float32)
    coo = sc.PaddedCOO(values, np.arange(0, 100_000, 100, dtype=np.int32), 100_000)
    encoded = jax.jit(WIRE.two_bits().encode)(coo, np.uint32(0))
    assert np.asarray(encoded.sent).all()
    assert np.sum(np.square(encoded.error)) < 0.01 * np.sum(np.square(values))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.one_in(3)
def test_special_values(name):
    encode, decode = jitted(name)
    largest = np.finfo(np.float32).max
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-45, largest, -largest, 1.0]
    values = np.asarray(special, np.float32)
    coo = sc.PaddedCOO(values, np.arange(10, dtype=np.int32), 5000)
    message, sent, error = encode(coo, np.uint32(1))
    decoded = decode(message, 5000, jnp.float32)
    arrived = np.asarray(decoded.values)[np.asarray(decoded.indices) < 5000]
    sent = np.asarray(sent)
    assert np.flatnonzero(~sent).tolist() == ([0, 1, 5, 6] if name in WAITING else [])
    check_conserved(values[sent], arrived, np.asarray(error)[sent])
    if name in WAITING:
        assert (np.asarray(error)[~sent] == 0).all()
        return
    assert arrived[:2].tolist() == [0, 0]
    # Subnormals stay with the sender, to the bit.
    np.testing.assert_array_equal(np.asarray(error)[5:7].view(np.int32), values[5:7].view(np.int32))
    if name in ("bf16", "narrow16"):
        np.testing.assert_array_equal(arrived[2:5], values[2:5])
        np.testing.assert_array_equal(np.signbit(arrived[:2]), [False, True])
        assert arrived[7] == np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


@pytest.mark.parametrize("name", ["bf16", "narrow16"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_bf16_rounds_to_nearest_even(name, seed):
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2**32, 70, dtype=np.uint64).astype(np.uint32)
    patterns[:20] = (patterns[:20] & 0xFFFF0000) | 0x8000  # ties
    values = patterns.view(np.float32)
    normal = np.isfinite(values) & (np.abs(values) > 1e-29) & (np.abs(values) < 1e38)
    values = np.where(normal, values, 1).astype(np.float32)
    coo = sc.PaddedCOO(values[None], np.arange(70, dtype=np.int32)[None], 5000)
    encode, decode = jitted(name)
    decoded = decode(encode(coo, np.uint32(0)).message, 5000, jnp.float32)
    arrived = np.asarray(decoded.values)[np.asarray(decoded.indices) < 5000]
    same(arrived, values.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.one_in(3)
def test_sixteen_bit_values(name, dtype):
    """All 16-bit values at once, in blocks of similar magnitude."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    coo = sc.PaddedCOO(jnp.asarray(values), jnp.arange(1 << 16, dtype=jnp.int32), 1 << 16)
    encode, decode = jitted(name)
    message, sent, error = encode(coo, np.uint32(5))
    decoded = decode(message, 1 << 16, dtype)
    assert decoded.values.dtype == error.dtype == dtype
    sent = np.asarray(sent)
    with np.errstate(invalid="ignore"):
        tiny = np.abs(values.astype(np.float32)) < 2.0**-100
    if name in WAITING:
        assert not (sent & tiny).any()
        # The four smallest float16 numbers of either sign are far below the rest of their block.
        assert (~sent & ~tiny).sum() == (8 if dtype == np.float16 else 0)
    else:
        assert sent.all()
    arrived = np.asarray(decoded.values)[np.asarray(decoded.indices) < 1 << 16]
    values, error = values[sent], np.asarray(error)[sent]
    finite = np.isfinite(values.astype(np.float32))
    assert (np.isfinite(arrived.astype(np.float32)) == finite).all()
    arrived, exact, error = (
        np.asarray(x).astype(np.float32)[finite].astype(np.float64)
        for x in (arrived, values, error)
    )
    rounding = float(ml_dtypes.finfo(dtype).eps) * np.maximum(np.abs(exact), np.abs(arrived))
    assert (np.abs(exact - arrived - error) <= rounding + 1e-38).all()


@pytest.mark.parametrize("name", slow_but(CODECS.keys() - set(OF_GAPS[1:]), CODECS))
@pytest.mark.parametrize("shape", [(0, 7), (2, 2, 3)])
@pytest.mark.one_in(3)
def test_leading_dimensions_stay_and_empty_messages_decode(name, shape):
    encode, decode = jitted(name)
    values = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    indices = np.broadcast_to(np.arange(shape[-1], dtype=np.int32) * 1000, shape)
    for coo in (
        sc.PaddedCOO(values, indices, 5000),
        sc.PaddedCOO(values * 0, np.full(shape, 5000, np.int32), 5000),
    ):
        message, sent, error = encode(coo, np.uint32(0))
        decoded = decode(message, 5000, jnp.float32)
        assert message.shape[:-1] == decoded.indices.shape[:-1] == shape[:-1]
        assert sent.shape == error.shape == shape
        np.testing.assert_array_equal(sent, np.asarray(coo.indices) < 5000)
        assert (np.asarray(decoded.indices) < 5000).sum() == np.asarray(sent).sum()
    encode, decode = jitted_dense(name)
    message, error = encode(values, np.uint32(0))
    assert decode(message, shape[-1], jnp.float32).shape == error.shape == shape


@pytest.mark.parametrize(
    "name", slow_but(("qsgd 2 max", "raw"), [name for name in EVERY if not name.endswith("l2")])
)
def test_rows_are_encoded_by_themselves_and_jit_changes_no_bit(name):
    codec, seed = EVERY[name], np.uint32(9)
    coo = any_coo(np.random.default_rng(3), 5000)
    whole = jitted(name)[0](coo, seed)
    others = [jax.jit(jax.vmap(codec.encode, in_axes=(0, None)))(coo, seed)]
    if name in ("bf16", "qsgd 8 max"):  # the others, op by op, take half a minute to compile
        others.append(codec.encode(coo, seed))
    for other in others:
        np.testing.assert_array_equal(other.message, whole.message)
        np.testing.assert_array_equal(other.sent, whole.sent)
        # The compiler may fuse a product and a sum, and round one time less.
        np.testing.assert_allclose(other.error, whole.error, rtol=0, atol=1e-6)
    decode = jitted(name)[1]
    both = decode(whole.message, 5000, jnp.float32)
    one = decode(whole.message[1], 5000, jnp.float32)
    np.testing.assert_array_equal(one.indices, both.indices[1])
    same(one.values, both.values[1])


@pytest.mark.parametrize("name", EVERY)
def test_lowers_for_a_gpu_at_the_largest_size(name):
    codec = EVERY[name]

    def there_and_back(values, indices, seed):
        encoded = codec.encode(sc.PaddedCOO(values, indices, LARGEST), seed)
        return codec.decode(encoded.message, LARGEST, jnp.float32), encoded

    shapes = [jax.ShapeDtypeStruct((4, 1000), dtype) for dtype in (jnp.float32, jnp.int32)]
    traced = jax.jit(there_and_back).trace(*shapes, jax.ShapeDtypeStruct((), jnp.uint32))
    assert "stablehlo" in traced.lower(lowering_platforms=("cuda",)).as_text()
