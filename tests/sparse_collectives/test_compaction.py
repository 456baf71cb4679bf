"""Compaction against np.nonzero: ascending, unique, padded at the end, and fair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_collectives import padded_coo
from sparse_collectives._coo import _bits, compaction
from tests.reference import selection, windows

# Under one word, a full word, one entry more, and many words with a rest.
SIZES = (1, 5, 31, 32, 33, 1000)
# Room for one entry, for some, and for more than there are.
CAPACITIES = {size: sorted({1, max(1, size // 3), size + 2}) for size in SIZES}
CASES = [(size, capacity) for size in SIZES for capacity in CAPACITIES[size]]


@functools.cache
def positions(size, capacity):
    def all_of_them(mask, turn, rank):
        words = compaction.mask_words(lambda start, stop: mask[start:stop], size)
        return {
            "words": words,
            "first": compaction.set_positions(words, capacity, size),
            "window": compaction.set_positions(words, capacity, size, turn),
            "nth": compaction.nth_position(words, rank),
        }

    return jax.jit(all_of_them)


@functools.cache
def compact(size, capacity):
    def all_of_them(x, threshold, cutoff, turn):
        bits = _bits.magnitude_bits(threshold)
        return {
            "plain": compaction.compact(x, bits, capacity=capacity),
            "cutoff": compaction.compact(x, bits, capacity=capacity, tie_cutoff=cutoff),
            "turn": compaction.compact(x, bits, capacity=capacity, turn=turn),
        }

    del size
    return jax.jit(all_of_them)


def padded(indices, capacity, size):
    """The first ``capacity`` of the indices, then padding."""
    kept = indices[:capacity]
    return np.concatenate([kept, np.full(capacity - len(kept), size)])


@st.composite
def masks(draw):
    """A case, and a mask with fewer, as many or more set bits than slots."""
    size, capacity = draw(st.sampled_from(CASES))
    around = (0, 1, capacity - 1, capacity, capacity + 1, size // 2, size - 1, size)
    count = min(size, max(0, draw(st.sampled_from(around))))
    order = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).permutation(size)
    where = draw(st.sampled_from(["anywhere", "front", "back"]))
    mask = np.zeros(size, bool)
    mask[
        {"anywhere": order[:count], "front": slice(count), "back": slice(size - count, None)}[where]
    ] = True
    return size, capacity, mask


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(masks(), st.integers(0, 2**31 - 1), st.integers(0, 1000))
def test_positions_are_those_of_nonzero(drawn, turn, rank):
    size, capacity, mask = drawn
    out = positions(size, capacity)(mask, turn, rank)
    expected = np.flatnonzero(mask)
    bits = np.unpackbits(np.asarray(out["words"]).view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(np.flatnonzero(bits), expected)
    for name, entries in (
        ("first", expected),
        ("window", windows.window(expected, capacity, turn)),
    ):
        found, count = out[name]
        assert found.dtype == jnp.int32
        assert count.dtype == jnp.int32
        assert count == len(expected)
        np.testing.assert_array_equal(found, padded(entries, capacity, size), name)
    position, count = out["nth"]
    assert count == len(expected)
    if rank < len(expected):
        assert position == expected[rank]


def test_every_rank_has_its_position():
    mask = np.random.default_rng(0).random(1000) < 0.3
    words = jnp.asarray(np.packbits(np.pad(mask, (0, 24)), bitorder="little").view("<u4"))
    expected = np.flatnonzero(mask)
    ranks = jnp.arange(len(expected), dtype=jnp.int32)
    found, count = jax.vmap(compaction.nth_position, in_axes=(None, 0))(words, ranks)
    np.testing.assert_array_equal(found, expected)
    assert (count == len(expected)).all()


@st.composite
def vectors(draw):
    size, capacity = draw(st.sampled_from(CASES))
    name = draw(st.sampled_from(selection.HARD_NAMES))
    x = selection.hard_vector(name, size, draw(st.integers(0, 2**32 - 1)))
    # A magnitude that occurs, the next one above it, or one of its own.
    threshold = np.abs(x[draw(st.integers(0, size - 1))])
    kind = draw(st.sampled_from(["present", "above", "free", "smallest"]))
    if kind == "above":
        threshold = np.nextafter(threshold, np.float32(np.inf))
    elif kind == "free":
        threshold = np.float32(draw(st.floats(0, 8, width=32)))
    elif kind == "smallest":
        threshold = np.float32(draw(st.sampled_from([0.0, 2**-149, 2**-148, 2**-126])))
    return size, capacity, x, threshold


def check_coo(coo, count, x, entries, passed, capacity):
    assert coo.size == x.size
    assert coo.capacity == capacity
    assert coo.values.dtype == x.dtype
    assert coo.indices.dtype == jnp.int32
    assert count == passed
    assert coo.count() == min(len(entries), capacity)
    indices = np.asarray(coo.indices)
    np.testing.assert_array_equal(indices, padded(entries, capacity, x.size))
    values = np.concatenate([x[entries[:capacity]], np.zeros(max(0, capacity - len(entries)))])
    np.testing.assert_array_equal(
        np.asarray(coo.values).view(np.int32), values.astype(np.float32).view(np.int32)
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(vectors(), st.integers(0, 1000), st.integers(0, 2**31 - 1))
def test_compact_takes_what_reaches_the_threshold(drawn, cutoff, turn):
    size, capacity, x, threshold = drawn
    out = compact(size, capacity)(x, threshold, cutoff, turn)
    reached = selection.passing(x, threshold)
    check_coo(*out["plain"], x, reached, len(reached), capacity)
    check_coo(*out["turn"], x, windows.window(reached, capacity, turn), len(reached), capacity)
    at_threshold = selection.magnitudes(x[reached]) == threshold
    at_threshold |= np.isnan(threshold) & np.isnan(x[reached])
    before = reached[~at_threshold | (reached < cutoff)]
    check_coo(*out["cutoff"], x, before, len(before), capacity)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(masks(), st.integers(0, 2**32 - 1))
def test_compact_mask_moves_the_chosen_slots_to_the_front(drawn, seed):
    slots, capacity, mask = drawn
    rng = np.random.default_rng(seed)
    size = 5000
    indices = np.sort(rng.choice(size, slots, replace=False)).astype(np.int32)
    # The last slots are padding, and the mask may hold there as well.
    used = int(rng.integers(0, slots + 1))
    indices[used:] = size
    values = np.where(np.arange(slots) < used, rng.standard_normal(slots), 0).astype(np.float32)
    coo = padded_coo.PaddedCOO(jnp.asarray(values), jnp.asarray(indices), size)
    out, count = compact_mask(capacity)(coo, mask)
    assert count == mask.sum()
    assert (out.size, out.capacity) == (size, capacity)
    np.testing.assert_array_equal(out.indices, padded(indices[mask], capacity, size))
    expected = np.concatenate([values[mask], np.zeros(capacity, np.float32)])[:capacity]
    np.testing.assert_array_equal(out.values, expected)


@functools.cache
def compact_mask(capacity):
    return jax.jit(functools.partial(compaction.compact_mask, capacity=capacity))


@functools.cache
def windowed_rank(capacity):
    slot = jnp.arange(capacity, dtype=jnp.int32)

    def of_turns(count, turns):
        return jax.vmap(lambda turn: compaction.windowed_rank(slot, count, capacity, turn))(turns)

    return jax.jit(of_turns)


TURNS = 64
counts = st.one_of(st.integers(0, 70), st.integers(0, 2**31 - 1))


@pytest.mark.parametrize("capacity", [1, 7, 32])
@settings(max_examples=50, deadline=None)
@given(count=counts, turn=st.integers(-(2**31), 2**31 - 1))
def test_a_window_has_an_entry_for_each_slot_in_ascending_order(capacity, count, turn):
    turns = np.full(TURNS, turn, np.int32)
    ranks = np.asarray(windowed_rank(capacity)(count, turns))[0].astype(np.int64)
    if count <= capacity:
        np.testing.assert_array_equal(ranks, np.arange(capacity))
    else:
        assert ranks[0] >= 0
        assert ranks[-1] < count
        assert (np.diff(ranks) > 0).all()
        entries = windows.start(turn, count) + np.arange(capacity)
        np.testing.assert_array_equal(ranks, np.sort(entries % count))


@pytest.mark.parametrize("capacity", [1, 7, 32])
@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 64), start=st.integers(0, 2**20))
def test_over_enough_turns_every_entry_gets_a_slot(capacity, count, start):
    enough = windows.steps_for_all(capacity, count) if count > capacity else 1
    # One program for all counts.
    turns = np.arange(start, start + windows.steps_for_all(capacity, 65), dtype=np.int32)
    ranks = np.asarray(windowed_rank(capacity)(count, turns))[:enough]
    assert set(range(count)) <= set(ranks.ravel().tolist())


def test_each_entry_has_its_share_of_the_turns_and_waits_as_if_by_chance():
    capacity, count, turns = 30, 100, 20_000
    ranks = np.asarray(windowed_rank(capacity)(count, np.arange(turns, dtype=np.int32)))
    served = np.zeros((turns, count), bool)
    served[np.arange(turns)[:, None], ranks] = True
    # Five standard deviations.
    assert np.abs(served.mean(0) - 0.3).max() < 5 * np.sqrt(0.21 / turns)
    # Neighbouring steps, and steps at some distance, are independent of each other.
    for distance in range(1, 9):
        both = (served[distance:] & served[:-distance]).mean()
        assert both == pytest.approx(0.09, rel=0.02)


def test_windows_of_counts_that_differ_by_row():
    capacity = 4
    count = np.array([[0], [3], [4], [5], [9]], np.int32)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    ranks = np.asarray(
        compaction.windowed_rank(slot[None], jnp.asarray(count), capacity, jnp.int32(1))
    )
    crowded = [windows.window(np.arange(c), capacity, 1).tolist() for c in (5, 9)]
    assert ranks.tolist() == [[0, 1, 2, 3]] * 3 + crowded


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compact_of_sixteen_bit_values(dtype):
    x = np.asarray(jnp.asarray(selection.hard_vector("normal", 1000), dtype))
    threshold = selection.kth_magnitude(x, 100)
    coo, count = compact(1000, 333)(x, np.float32(threshold), 0, 0)["plain"]
    reached = selection.passing(x, threshold)
    assert count == len(reached)
    assert coo.values.dtype == x.dtype
    np.testing.assert_array_equal(coo.indices, padded(reached, 333, 1000))
    np.testing.assert_array_equal(coo.values[: len(reached)], x[reached])


def test_a_cutoff_at_threshold_zero_still_takes_all_nonzeros():
    x = np.array([2**-149, 0, -(2**-149), 2**-148, 1], np.float32)
    coo, count = compact(5, 7)(x, np.float32(0), 1, 0)["cutoff"]
    check_coo(coo, count, x, np.array([0, 2, 3, 4]), 4, 7)


def test_a_cutoff_at_the_largest_nan_takes_nothing_below_it():
    largest = np.uint32(0x7FFFFFFF).view(np.float32)
    x = np.array([largest, 0, 1, largest, largest], np.float32)
    coo, count = compact(5, 7)(x, largest, 4, 0)["cutoff"]
    check_coo(coo, count, x, np.array([0, 3]), 2, 7)


@pytest.mark.parametrize("capacity", [1, 40, 333, 900, 2000])
def test_both_ways_to_find_the_word_of_a_slot_agree(capacity, monkeypatch):
    """A running maximum over marks, or a binary search, whichever the sizes favour."""
    size = 1600
    rng = np.random.default_rng(capacity)
    dense = [np.zeros(size, bool), np.ones(size, bool)]
    masks = dense + [rng.random(size) < share for share in (0.02, 0.2, 0.5, 0.6, 0.9)]
    ways = []
    for words_per_slot in (1e-9, 1e9):  # always a search, never a search
        monkeypatch.setattr(compaction, "_SLOTS_PER_WORD", words_per_slot)

        @jax.jit
        def positions(mask, turn):
            words = compaction.mask_words(lambda start, stop: mask[start:stop], size)
            return compaction.set_positions(words, capacity, size, turn)

        ways.append(
            [
                np.asarray(positions(mask, jnp.int32(turn))[0])
                for mask in masks
                for turn in (0, 1, 2, 5, 77)
            ]
        )
    assert all((a == b).all() for a, b in zip(*ways, strict=True))
