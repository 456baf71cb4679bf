"""Ascending indices in a few bits each, whatever they are.

A vector is divided into pages of ``2**low`` places. How many entries each page has is in half
a word, and of an index only the bits within its page are sent. Nothing can fail to fit, and
the length of a message is known when it is compiled. Large pages suit few entries: of the
sizes the one with the shortest message is taken.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives._coo import search
from sparse_collectives.wire import _packing

# Bits of an index; of the largest pages a count may need 17.
LOW_BITS = (6, 8, 10, 15)
_COUNT_BITS = 16


def low_bits(slots: int, width: int) -> int:
    """The bits of a place in a page with which ``slots`` indices take the fewest words."""
    return min(LOW_BITS, key=lambda low: _words(slots, width, low))


def words(slots: int, width: int) -> int:
    """Words of the indices in so many slots."""
    return min(_words(slots, width, low) for low in LOW_BITS)


def encode(local: jax.Array, width: int) -> jax.Array:
    """``local i32[c]``, ascending with ``width`` for padding at the end: ``i32[w]``."""
    low = low_bits(local.shape[0], width)
    # In NumPy: the last edge may be 2**31.
    edges = np.minimum(np.arange(_pages(width, low) + 1, dtype=np.int64) << low, width)
    counts = jnp.diff(search.places(local, jnp.asarray(edges, jnp.int32)))
    within = _packing.pack(local & ((1 << low) - 1), low)
    return jnp.concatenate([_packing.pack(counts, _COUNT_BITS), within])


def decode(message: jax.Array, slots: int, width: int) -> jax.Array:
    """The inverse of :func:`encode`, ``i32[c]``, with ``width`` for padding."""
    low = low_bits(slots, width)
    count_words = -(-_pages(width, low) * _COUNT_BITS // 32)
    ends = jnp.cumsum(_packing.unpack(message[:count_words], _COUNT_BITS), dtype=jnp.int32)
    within = _packing.unpack(message[count_words:], low)[:slots]
    slot = jnp.arange(slots, dtype=jnp.int32)
    # Each page that ends at a slot moves it, and all behind it, one page on.
    marks = jnp.zeros((slots,), jnp.int32).at[ends].add(1, mode="drop")
    page = jnp.cumsum(marks, dtype=jnp.int32)
    return jnp.where(slot < ends[-1], (page << low) | within, width)


def _pages(width: int, low: int) -> int:
    return -(-width >> low)


def _words(slots: int, width: int, low: int) -> int:
    return -(-_pages(width, low) * _COUNT_BITS // 32) + -(-slots // (32 // low))
