"""Gaps with escapes: what fits arrives, and what does not is said, and not always the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_collectives as sc
from tests.sparse_collectives.helpers import slow_but

LARGEST = 2**31 - 1
SLOTS = 24
CODECS = {
    "narrow16": sc.wire.narrow16(escapes=0.0),
    "narrow8": sc.wire.narrow8(escapes=0.0),
    "narrow16, room": sc.wire.narrow16(escapes=1.0),
}


@functools.cache
def round_trip(name, slots=SLOTS):
    codec = CODECS[name]

    def both(values, indices, seed):
        encoded = codec.encode(sc.PaddedCOO(values, indices, LARGEST), seed)
        return encoded.sent, codec.decode(encoded.message, LARGEST, jnp.float32)

    return jax.jit(both)


def arrivals(name, indices, seed):
    indices = np.asarray(indices, np.int32)
    sent, decoded = round_trip(name, indices.size)(
        np.ones(indices.size, np.float32), indices, np.uint32(seed)
    )
    got = np.asarray(decoded.indices)
    np.testing.assert_array_equal(got[got < LARGEST], indices[np.asarray(sent)])
    return np.asarray(sent)


@pytest.mark.parametrize("name", slow_but(("narrow16", "narrow16, room"), CODECS))
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
    # Each takes at most four slots, and six more are left out where some must be.
    assert sent.sum() >= min(used.sum(), SLOTS // 4 - 6)


@pytest.mark.parametrize("name", ["narrow16", "narrow8"])
def test_no_entry_waits_for_ever(name):
    indices = np.arange(SLOTS) * 70_000_000
    often = sum(arrivals(name, indices, seed).astype(int) for seed in range(200))
    assert often.min() >= 20


@pytest.mark.parametrize("name", ["narrow16", "narrow8"])
def test_short_gaps_need_no_room(name):
    assert arrivals(name, LARGEST - 1 - 252 * np.arange(SLOTS)[::-1], 0).all()


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (sc.wire.bf16(), 1.5),
        (sc.wire.narrow16(), 1 + 1 / 16),
        (sc.wire.narrow8(), (1 + 1 / 8) * (1 / 2 + 1 / 128)),
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
    assert message.shape[1] == pytest.approx(words * 100_000, abs=10)


def test_one_percent_at_random_fits_half_a_word():
    rng = np.random.default_rng(0)
    indices = np.sort(rng.choice(500_000, 5000, replace=False)).astype(np.int32)
    coo = sc.PaddedCOO(np.ones(5000, np.float32), indices, 500_000)
    assert np.asarray(jax.jit(sc.wire.narrow8().encode)(coo, np.uint32(0)).sent).all()
