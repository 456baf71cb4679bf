"""Threshold compaction: from a mask over n entries to the indices that are set.

``jnp.nonzero(size=k)`` runs a prefix sum over all n entries. Here the mask is
packed 32 entries to a word in the same pass that compares, so the prefix sum
runs over n / 32 words; each output slot finds its word by a running sum or a
binary search, and its bit by halving. The indices come out ascending.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash
from sparse_collectives._data import PaddedCOO, take
from sparse_collectives._platform import by_platform, places, written
from sparse_collectives._sparse_ops import _bits, _bitset

# With fewer slots than 1/16 of the words, a binary search finds the word of each slot.
_SLOTS_PER_WORD = 16
# Computing the sums of fewer words again costs less than a branch.
_FEW_WORDS = 1 << 11


def set_positions(
    words: jax.Array, capacity: int, size: int, turn: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The ascending positions of the set bits, in ``capacity`` slots.

    Args:
      words: ``u32[ceil(size / 32)]``.
      capacity: the number of slots.
      size: the value of the slots that stay empty.
      turn: an integer, ``[]``. With more set bits than slots, some must wait: by
        default the last ones. With ``turn`` (a step count) the slots take a window
        of consecutive set bits that starts at a different place at each turn
        (:func:`windowed_rank`), so that no index waits indefinitely.

    Returns:
      ``(i32[capacity], i32[])``: the positions, and the number of set bits, which
      may be more than ``capacity``.

    Cost: a few passes over n / 32 words and over the slots.
    """
    counts = _bits.popcount(words)
    # Each slot reads two of the sums.
    add = _bits.running_sum
    inclusive = add(counts) if counts.size < _FEW_WORDS else written(add, counts)
    count = inclusive[-1]
    start = wrapped = jnp.zeros_like(count)
    if turn is not None:
        start, wrapped = window(count, capacity, turn)
    # Each slot finds its word and its bit; the work is over slots and words alone.
    slot = jnp.arange(capacity, dtype=jnp.int32)
    rank = jnp.where(slot < wrapped, slot, start + slot - wrapped)
    if capacity < words.shape[0] // _SLOTS_PER_WORD:
        word = places(inclusive, rank, side="right")
    else:
        word = _word_of_slot(inclusive, capacity, start, wrapped)
    position = _position_in_word(words, inclusive, word, rank)
    return jnp.where(rank < count, position, size), count


def _word_of_slot(
    inclusive: jax.Array, capacity: int, start: jax.Array, wrapped: jax.Array
) -> jax.Array:
    """The word of each slot, which is the number of words that end before the slot.

    Each word ends at the first slot after its last bit.
    """
    behind = wrapped + jnp.maximum(inclusive - start, 0)
    ends = jnp.where(inclusive < wrapped, inclusive, behind)

    def by_sum(ends: jax.Array) -> jax.Array:
        # A CPU takes longer for a running maximum. All words that end in one slot are counted.
        marks = jnp.zeros((capacity,), jnp.int32)
        return _bits.running_sum(marks.at[ends.astype(jnp.uint32)].add(1, mode="drop"))

    def by_maximum(ends: jax.Array) -> jax.Array:
        # On a GPU additions to one slot would take turns, so only the last of them writes.
        number = jnp.arange(1, ends.shape[0] + 1, dtype=jnp.int32)
        is_last = ends != jnp.append(ends[1:], capacity)
        slot = jnp.where(is_last, ends, capacity + number).astype(jnp.uint32)
        marks = jnp.zeros((capacity,), jnp.int32)
        return lax.cummax(marks.at[slot].set(number, mode="drop", unique_indices=True))

    return by_platform(by_sum, by_maximum, ends)


def nth_position(words: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The position of the set bit number ``rank`` (from 0), and the number of bits.

    If there are fewer set bits, the position has no meaning.
    """
    inclusive = _bits.running_sum(_bits.popcount(words))
    word = places(inclusive, rank, side="right")
    return _position_in_word(words, inclusive, word, rank), inclusive[-1]


def _position_in_word(
    words: jax.Array, inclusive: jax.Array, word: jax.Array, rank: jax.Array
) -> jax.Array:
    bits = words.at[word].get(mode="clip")
    before = inclusive.at[word].get(mode="clip") - _bits.popcount(bits)
    return 32 * word + _bits.select_bit(bits, rank - before)


def windowed_rank(slot: jax.Array, count: jax.Array, capacity: int, turn: jax.Array) -> jax.Array:
    """The entry, out of ``count``, that each slot takes if only ``capacity`` fit.

    The slots take a window of consecutive entries, modulo ``count``, in ascending order.
    With ``count <= capacity`` slot j takes entry j.

    The window starts at a hash of the turn. Therefore an entry is in it with probability
    ``capacity / count`` at each turn, whatever happened before. It waits for ``m`` turns
    with probability ``(1 - capacity / count)**m``, and gets its slot at turn number
    ``count / capacity`` on average. No other rule that depends on turns and counts alone
    guarantees more. A window that moves on by its own length serves a constant set of entries
    sooner (at turn ``ceil(count / capacity)`` at the latest), but may never serve an entry
    whose rank keeps out of its way, as can happen in periodic data. The hash is not secret: an
    adversary that computes it and chooses the other entries by it can keep an entry waiting.

    Args:
      slot: ``i32[..., capacity]``, 0 to capacity - 1.
      count: ``i32[...]``, broadcastable to ``slot``.
      capacity: static number of slots.
      turn: an integer, ``[]``. Several places that an entry passes in one step need different
        turns; otherwise a start that serves it at one place might never serve it at the next.
    """
    start, wrapped = window(count, capacity, turn)
    return jnp.where(slot < wrapped, slot, start + slot - wrapped)


def slot_of_rank(rank: jax.Array, start: jax.Array, wrapped: jax.Array, capacity: int) -> jax.Array:
    """The slot that takes the entry ``rank``, else ``capacity``: the inverse of the window.

    Args:
      rank: ``i32[...]``.
      start: the start of the window, from :func:`window`, broadcastable to ``rank``.
      wrapped: the number of its entries that wrap around, from :func:`window`, likewise.
      capacity: the number of slots.
    """
    slot = jnp.where(rank < wrapped, rank, rank - start + wrapped)
    return jnp.where(((rank < wrapped) | (rank >= start)) & (slot < capacity), slot, capacity)


def window(count: jax.Array, capacity: int, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The start of the window, and how many of its entries wrap around to the front."""
    exceeded = count > capacity
    start = jnp.where(exceeded, _hash.below(turn, count), 0)
    return start, jnp.where(exceeded, jnp.maximum(start - (count - capacity), 0), 0)


def bounded(coo: PaddedCOO, capacity: int, turn: jax.Array) -> tuple[PaddedCOO, PaddedCOO]:
    """The entries that fit ``capacity`` slots, and the other entries.

    Args:
      coo: ascending, padding last, c slots.
      capacity: slots; with c or more everything fits, and nothing is computed.
      turn: ``u32[]``, from :func:`._hash.turn`; it varies from step to step which entries fit.

    Returns:
      Two PaddedCOOs, of ``min(c, capacity)`` and of ``max(0, c - capacity)`` slots.
    """
    if capacity >= coo.capacity:
        return coo, PaddedCOO(coo.values[:0], coo.indices[:0], coo.size)
    count = coo.count()
    slot = jnp.arange(capacity, dtype=jnp.int32)
    rank = windowed_rank(slot, count, capacity, turn)
    source = jnp.where(slot < count, rank, coo.capacity)
    # The other entries lie before and after the window, or between its two parts.
    wrapped = jnp.sum(rank == slot, dtype=jnp.int32)
    place = jnp.arange(coo.capacity - capacity, dtype=jnp.int32)
    around = jnp.where(place < rank[0], place, place + capacity)
    left = jnp.where(wrapped > 0, place + wrapped, around)
    left = jnp.where(place < count - capacity, left, coo.capacity)
    return take(coo, source), take(coo, left)


def entries_at(
    x: jax.Array, words: jax.Array, capacity: int, turn: jax.Array | None = None
) -> tuple[PaddedCOO, jax.Array]:
    """The entries of ``x f[n]`` at the set bits of ``words``, and the number of these.

    The arguments are as for :func:`set_positions`.
    """
    indices, count = set_positions(words, capacity, x.shape[0], turn)
    return PaddedCOO(x.at[indices].get(mode="fill", fill_value=0), indices, x.shape[0]), count


def compact(
    x: jax.Array,
    threshold_bits: jax.Array,
    *,
    capacity: int,
    tie_cutoff: jax.Array | None = None,
    turn: jax.Array | None = None,
) -> tuple[PaddedCOO, jax.Array]:
    """The entries of ``x`` whose magnitude reaches a threshold.

    Args:
      x: ``f[n]``.
      threshold_bits: ``i32[]``, the bit pattern of the smallest magnitude to take
        (:func:`sparse_collectives._sparse_ops._bits.magnitude_bits`). Zeros are never taken.
      capacity: static number of slots of the result.
      tie_cutoff: ``i32[]``; entries exactly at the threshold are taken only below
        this index. By default all are taken.
      turn: see :func:`set_positions`.

    Returns:
      The PaddedCOO (ascending), and ``i32[]``, the number of entries that passed;
      those beyond ``capacity`` are not in the result.

    Cost: one read of n entries, n / 32 words of scratch, O(capacity log n).
    """
    size = x.shape[0]

    def mask_of(start, stop):
        bits = _bits.magnitude_bits(x[start:stop])
        if tie_cutoff is None:
            return bits >= jnp.maximum(threshold_bits, 1)
        first = jnp.arange(start, stop, dtype=jnp.int32) < tie_cutoff
        return (bits > threshold_bits) | ((bits == threshold_bits) & first & (bits > 0))

    return entries_at(x, _bits.mask_words(mask_of, size), capacity, turn)


def compact_mask(coo: PaddedCOO, mask: jax.Array, *, capacity: int) -> tuple[PaddedCOO, jax.Array]:
    """The slots of ``coo`` where ``mask`` holds, moved to the front, in order.

    Args:
      coo: with c slots.
      mask: ``bool[c]``.
      capacity: slots of the result; later entries that do not fit are left out.

    Returns:
      The PaddedCOO, and ``i32[]``, the number of slots where ``mask`` holds.
    """
    # With this many set slots a running sum beats finding each of them by its rank.
    rank = _bits.running_sum(mask)
    return to_slots(coo, jnp.where(mask, rank - 1, capacity), capacity=capacity), rank[-1]


def to_slots(coo: PaddedCOO, slot: jax.Array, *, capacity: int) -> PaddedCOO:
    """Moves entries of ``coo [c]`` to ``slot i32[c]``, each to its own; the others are dropped."""
    source = jnp.full((capacity,), coo.capacity, jnp.int32)
    # One scatter of slot numbers, instead of one of values and one of indices.
    source = source.at[slot].set(jnp.arange(coo.capacity, dtype=jnp.int32), mode="drop")
    return take(coo, source)


def compact_indices(
    x: jax.Array, indices: jax.Array, *, capacity: int
) -> tuple[PaddedCOO, jax.Array]:
    """The entries of ``x`` at unique indices that come in any order.

    Args:
      x: ``f[n]``.
      indices: ``i32[s]``; n marks an empty slot.
      capacity: slots of the result; later entries that do not fit are left out.

    Returns:
      The PaddedCOO (ascending), and ``i32[]``, the number of indices below n.

    Cost: O(s), and a few passes over n / 32 words.
    """
    return entries_at(x, _bitset.of_unique(indices, x.shape[0]), capacity)
