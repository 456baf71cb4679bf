"""Ascending indices in a message of static size (Elias 1974, Fano 1971).

An index is split into its lowest l bits, which are stored as they are, and the rest, its page. The
pages ascend as well, so that one bit set has all of them: entry j of page h is bit ``h + j``, and a
bit between two entries that is not set begins a page. Each of c indices below n takes l + 1 bits
and its share of the ``n / 2**l`` pages. With the best l that is about half a bit more than the
entropy of a set, ``log2(n / c) + 1.44`` bits an index, and nothing overflows.
"""

import functools

import jax
import jax.numpy as jnp

from sparse_collectives._sparse_ops import _bits, _bitset, _compaction


@functools.cache
def low_bits(slots: int, size: int) -> int:
    """The l with which ``slots`` indices below ``size`` take the fewest words."""
    return min(range(size.bit_length() + 1), key=functools.partial(_words, slots, size))


def words(slots: int, size: int) -> int:
    """Words of a message of so many slots."""
    return _words(slots, size, low_bits(slots, size))


def encode(indices: jax.Array, size: int) -> jax.Array:
    """Encodes ``i32[c]``, ascending and unique, with ``size`` for padding at the end.

    Returns:
      ``i32[words(c, size)]``; 0 in all words if there is no entry. Cost: l passes over the slots,
      and a scatter of c entries.
    """
    slots = indices.shape[0]
    low, bits = low_bits(slots, size), _length(slots, size, low_bits(slots, size))
    is_entry = indices < size
    place = (indices >> low) + jnp.arange(slots, dtype=jnp.int32)
    pages = _bitset.of_unique(jnp.where(is_entry, place, bits), bits)
    rest = jnp.where(is_entry, indices & ((1 << low) - 1), 0)
    return jnp.concatenate([pages.astype(jnp.int32), _bits.pack_planes(rest, low)])


def decode(message: jax.Array, slots: int, size: int) -> jax.Array:
    """The inverse of :func:`encode`, ``i32[slots]``, with ``size`` for padding."""
    low = low_bits(slots, size)
    bits = _length(slots, size, low)
    pages = message[: -(-bits // 32)].astype(jnp.uint32)
    place, count = _compaction.set_positions(pages, slots, bits)
    slot = jnp.arange(slots, dtype=jnp.int32)
    rest = _bits.unpack_planes(message[-(-bits // 32) :], low, slots)
    return jnp.where(slot < count, ((place - slot) << low) | rest, size)


def _length(slots: int, size: int, low: int) -> int:
    """Bits of the set: one for each entry, and one for each page."""
    return slots + (max(0, size - 1) >> low) + 1


def _words(slots: int, size: int, low: int) -> int:
    return -(-_length(slots, size, low) // 32) + low * -(-slots // 32)
