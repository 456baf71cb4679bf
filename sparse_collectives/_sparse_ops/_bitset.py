"""Sets of indices as bits: membership and rank in O(1) per query.

A set over n indices takes n / 8 bytes. It replaces sorting: merging and intersecting k sorted
indices cost a few gathers and scatters of k entries and one pass over n / 32 words.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives._data import PaddedCOO
from sparse_collectives._platform import by_platform
from sparse_collectives._sparse_ops import _bits


class RankedBitset(NamedTuple):
    """A set of indices with the number of members before each word.

    Attributes:
      words: ``u32[ceil(size / 32)]``.
      before: ``i32[ceil(size / 32)]``, members in the words to the left.
      count: ``i32[]``, members.
    """

    words: jax.Array
    before: jax.Array
    count: jax.Array


def empty(size: int) -> jax.Array:
    """An empty set, ``u32[ceil(size / 32)]``."""
    return jnp.zeros((-(-size // 32),), jnp.uint32)


def _bit(indices: jax.Array) -> jax.Array:
    return jnp.uint32(1) << (indices & 31).astype(jnp.uint32)


def of_unique(indices: jax.Array, size: int) -> jax.Array:
    """The set of unique ``indices``; ``size`` marks padding."""
    # A sum is an OR as long as no bit is added twice.
    bits = jnp.where(indices < size, _bit(indices), jnp.uint32(0))
    return empty(size).at[indices >> 5].add(bits, mode="drop")


def contains(words: jax.Array, indices: jax.Array) -> jax.Array:
    """Whether each index is in the set. Indices past the last word are not."""
    found = words.at[indices >> 5].get(mode="fill", fill_value=0)
    return (found & _bit(indices)) != 0


def insert(words: jax.Array, indices: jax.Array, size: int) -> jax.Array:
    """The set with ``indices`` added; they are unique, and ``size`` marks padding."""
    # A sum is an OR as long as no bit is added twice: unique indices, and only
    # those that are not members yet.
    new = (indices < size) & ~contains(words, indices)
    bits = jnp.where(new, _bit(indices), jnp.uint32(0))
    return words.at[indices >> 5].add(bits, mode="drop")


def rank_index(words: jax.Array) -> RankedBitset:
    """Prefix counts, for :func:`rank`. Cost: two passes over n / 32 words."""
    counts = _bits.popcount(words)
    inclusive = _bits.running_sum(counts)
    return RankedBitset(words, inclusive - counts, inclusive[-1])


def rank(ranked: RankedBitset, indices: jax.Array) -> jax.Array:
    """How many members are smaller than each (member) index, ``i32``."""
    word = indices >> 5
    below = ranked.words.at[word].get(mode="fill", fill_value=0) & (_bit(indices) - 1)
    before = ranked.before.at[word].get(mode="fill", fill_value=0)
    return before + _bits.popcount(below)


def to_dense(coo: PaddedCOO) -> jax.Array:
    """``coo.to_dense()`` for unique indices, in the loop that reads it on a GPU.

    There no vector of n zeros is written, scattered to and read again: an entry is the value at
    its rank in the set of the indices, and most ranks are in the cache.

    Cost: a few gathers and scatters of k entries, two passes over n / 32 words, and in each loop
    that reads the vector two words and a value for an entry. On a CPU, :meth:`PaddedCOO.to_dense`.
    """
    return by_platform(PaddedCOO.to_dense, _by_rank, coo)


def _by_rank(coo: PaddedCOO) -> jax.Array:
    if not coo.capacity or not coo.size:
        return coo.to_dense()
    ranked = rank_index(of_unique(coo.indices, coo.size))
    slot = jnp.where(coo.indices < coo.size, rank(ranked, coo.indices), coo.capacity)
    ascending = jnp.zeros_like(coo.values).at[slot].set(coo.values, mode="drop")
    index = jnp.arange(coo.size, dtype=jnp.int32)
    # One read of the word for both questions: XLA would write the first answer to memory.
    word, before = (x.at[index >> 5].get(mode="promise_in_bounds") for x in ranked[:2])
    value = ascending.at[before + _bits.popcount(word & (_bit(index) - 1))].get(mode="clip")
    return jnp.where((word & _bit(index)) != 0, value, jnp.zeros_like(value))
