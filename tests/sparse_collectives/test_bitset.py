"""A bitset against Python's sets and NumPy's sorted arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_collectives._coo import _bitset

# Under one word, a full word, one bit more, and many words with a rest.
SIZES = (5, 31, 32, 33, 1000)
SLOTS = 9


@functools.cache
def insert(size):
    return jax.jit(lambda words, indices: _bitset.insert(words, indices, size))


@functools.cache
def queries(size):
    def ask(words):
        everything = jnp.arange(size, dtype=jnp.int32)
        ranked = _bitset.rank_index(words)
        return {
            "member": _bitset.contains(words, everything),
            "rank": _bitset.rank(ranked, everything),
            "ranked": ranked,
        }

    return jax.jit(ask)


@st.composite
def batches(draw):
    """A size, and arrays of unique indices with padding anywhere between them."""
    size = draw(st.sampled_from(SIZES))
    edges = sorted({0, 1, size // 2, size - 1, min(31, size - 1), min(32, size - 1)})
    index = st.one_of(st.integers(0, size - 1), st.sampled_from(edges))
    arrays = []
    for _ in range(draw(st.integers(1, 5))):
        chosen = draw(st.lists(index, unique=True, max_size=min(SLOTS, size)))
        padded = draw(st.permutations(chosen + [size] * (SLOTS - len(chosen))))
        arrays.append(np.array(padded, np.int32))
    return size, arrays


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(batches())
def test_a_set_holds_what_was_inserted_and_ranks_it(drawn):
    size, arrays = drawn
    words = _bitset.empty(size)
    members = set()
    for indices in arrays:
        words = insert(size)(words, indices)
        members |= set(indices.tolist()) - {size}
    assert words.dtype == jnp.uint32
    assert words.shape == (-(-size // 32),)
    expected = np.array(sorted(members), np.int32)
    answers = queries(size)(words)
    np.testing.assert_array_equal(np.flatnonzero(answers["member"]), expected)
    assert answers["rank"].dtype == jnp.int32
    np.testing.assert_array_equal(answers["rank"], np.searchsorted(expected, np.arange(size)))
    ranked = answers["ranked"]
    assert ranked.count == len(members)
    starts = 32 * np.arange(words.shape[0])
    np.testing.assert_array_equal(ranked.before, np.searchsorted(expected, starts))
    np.testing.assert_array_equal(ranked.words, words)


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_set_has_no_members(size):
    answers = queries(size)(_bitset.empty(size))
    assert not answers["member"].any()
    assert not answers["rank"].any()
    assert answers["ranked"].count == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_full_set_ranks_each_index_by_itself(size):
    words = _bitset.empty(size)
    everything = np.arange(-(-size // SLOTS) * SLOTS, dtype=np.int32)
    everything = np.minimum(everything, size).reshape(-1, SLOTS)
    # Twice: what is a member already changes nothing.
    for indices in (*everything, *everything):
        words = insert(size)(words, indices)
    answers = queries(size)(words)
    assert answers["member"].all()
    np.testing.assert_array_equal(answers["rank"], np.arange(size))
    assert answers["ranked"].count == size


@pytest.mark.parametrize("size", SIZES)
def test_padding_is_ignored_and_nothing_past_the_end_is_a_member(size):
    before = insert(size)(_bitset.empty(size), np.array([0] + [size] * (SLOTS - 1), np.int32))
    after = insert(size)(before, np.full(SLOTS, size, np.int32))
    np.testing.assert_array_equal(before, after)
    past = np.array([size, size + 1, size + 31, size + 32, 64 * size, 2**31 - 1], np.int32)
    assert not _bitset.contains(after, past).any()
