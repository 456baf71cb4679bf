"""Ascending indices in 16 bits each, whatever they are.

A vector is divided into pages of 2**16 places. How many entries each page has is a word,
and of an index only the 16 bits within its page are sent. Nothing can fail to fit, and the
length of a message is known when it is compiled. A page costs what two entries do: with one
entry in a thousand it has 65.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives.wire import _packing

_BITS = 16


def pages(width: int) -> int:
    """Pages of a vector of ``width`` places."""
    return -(-width >> _BITS)


def words(slots: int, width: int) -> int:
    """Words of the indices in so many slots."""
    return pages(width) + -(-slots // 2)


def encode(local: jax.Array, width: int) -> jax.Array:
    """``local i32[c]``, ascending with ``width`` for padding at the end: ``i32[w]``."""
    # In NumPy: the last edge may be 2**31.
    edges = np.minimum(np.arange(pages(width) + 1, dtype=np.int64) << _BITS, width)
    edges = jnp.asarray(edges, jnp.int32)
    counts = jnp.diff(jnp.searchsorted(local, edges).astype(jnp.int32))
    return jnp.concatenate([counts, _packing.pack(local & ((1 << _BITS) - 1), _BITS)])


def decode(message: jax.Array, slots: int, width: int) -> jax.Array:
    """The inverse of :func:`encode`, ``i32[c]``, with ``width`` for padding."""
    ends = jnp.cumsum(message[: pages(width)])
    low = _packing.unpack(message[pages(width) :], _BITS)[:slots]
    slot = jnp.arange(slots, dtype=jnp.int32)
    page = jnp.searchsorted(ends, slot, side="right").astype(jnp.int32)
    return jnp.where(slot < ends[-1], (page << _BITS) | low, width)
