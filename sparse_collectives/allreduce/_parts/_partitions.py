"""n indices dealt out to P owners in small blocks, and codes of a few bits for their places.

Block b belongs to partition b mod P, and the indices after the last whole round of blocks are
dealt out in runs of equal length. All partitions then have similar contents: a selection of
k/P entries from each is about the k largest of all, and the threshold of one partition is a
good guess for the next.

Places are sent in pages of ``2**low``. A message has the number of entries of each page, in half a
word, and the bits of each place within its page. Everything fits, and the length of a message is
known at compile time. Large pages suit few entries; the size with the shortest message is chosen.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_collectives._platform import once, places
from sparse_collectives._sparse_ops import _bits

# Indices of a block: 4 KB of float32, so that memory is read in long runs.
BLOCK = 1024
# A partition has at least so many blocks, if it has at least as many indices.
_BLOCKS = 32
# Bits of a place in a page; with 16 of them, a count could need 17 bits.
LOW_BITS = (6, 8, 10, 15)
_COUNT_BITS = 16


class Partitions(NamedTuple):
    """How n indices are dealt out.

    Attributes:
      size: n.
      workers: P.
      block: indices of a block.
      rounds: blocks of each partition.
      rest: indices of each partition after the blocks; the last partitions may have fewer.
    """

    size: int
    workers: int
    block: int
    rounds: int
    rest: int

    @property
    def width(self) -> int:
        """Places of a partition; places after its last index are empty."""
        return self.rounds * self.block + self.rest

    @property
    def _dealt(self) -> int:
        return self.rounds * self.workers * self.block

    def take(self, vector: jax.Array, partition: jax.Array) -> jax.Array:
        """The entries ``f[width]`` of a partition of ``vector f[n]``, zeros in empty places."""
        if self.workers == 1:
            return vector

        def blocks_of(vector: jax.Array, partition: jax.Array) -> jax.Array:
            blocks = vector[: self._dealt].reshape(self.rounds, self.workers, self.block)
            return lax.dynamic_slice_in_dim(blocks, partition, 1, axis=1)[:, 0]

        def zeros(vector: jax.Array, partition: jax.Array) -> jax.Array:
            return jnp.zeros_like(blocks_of(vector, partition))

        # As rows: if XLA's CPU compiler fuses them, it divides for the place of each entry.
        mine = once(partition >= 0, blocks_of, zeros, vector, partition).reshape(-1)
        if not self.rest:
            return mine
        missing = self.workers * self.rest - (self.size - self._dealt)
        rest = jnp.pad(vector[self._dealt :], (0, missing))
        start = partition.astype(jnp.int32) * self.rest
        return jnp.concatenate([mine, lax.dynamic_slice_in_dim(rest, start, self.rest)])

    def place(self, local: jax.Array, partition: jax.Array) -> jax.Array:
        """The indices of the places ``local i32[...]`` of a partition, n for places outside it.

        They ascend if the places do.
        """
        whole = self.rounds * self.block
        # Results for negative places have no meaning; they are outside.
        number, within = _divided(local, self.block)
        dealt = (number * self.workers + partition) * self.block + within
        behind = self._dealt + partition * self.rest + (local - whole)
        index = jnp.where(local < whole, dealt, behind)
        inside = (local >= 0) & (local < self.width) & (index < self.size)
        return jnp.where(inside, index, self.size)

    def local(self, indices: jax.Array, partition: jax.Array) -> jax.Array:
        """The places of ``indices i32[...]`` in a partition; ``width`` for indices outside it."""
        number, within = _divided(indices, self.block)
        turn, owner = _divided(number, self.workers)
        dealt = indices < self._dealt
        last, behind = _divided(indices - self._dealt, max(1, self.rest))
        owner = jnp.where(dealt, owner, last)
        place = jnp.where(dealt, turn, self.rounds) * self.block
        place = place + jnp.where(dealt, within, behind)
        return jnp.where((indices < self.size) & (owner == partition), place, self.width)


def _divided(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    # Unsigned: a shift and a mask for a power of two; signed integers take four operations more.
    dividend, divisor = x.astype(jnp.uint32), jnp.uint32(by)
    return (dividend // divisor).astype(jnp.int32), (dividend % divisor).astype(jnp.int32)


def make_partitions(size: int, workers: int) -> Partitions:
    """The partitions of n indices for P workers."""
    block = max(1, min(BLOCK, size // (_BLOCKS * workers)))
    rounds = size // (workers * block)
    return Partitions(
        size, workers, block, rounds, -(-(size - rounds * workers * block) // workers)
    )


def low_bits(slots: int, width: int) -> int:
    """The bits of a place in a page with which ``slots`` indices take the fewest words."""
    return min(LOW_BITS, key=functools.partial(_words, slots, width))


def words(slots: int, width: int) -> int:
    """Words of the indices in so many slots."""
    return _words(slots, width, low_bits(slots, width))


def encode(local: jax.Array, width: int) -> jax.Array:
    """Encodes ``local i32[c]``, ascending with ``width`` for padding at the end, as ``i32[w]``."""
    low = low_bits(local.shape[0], width)
    # In NumPy: the last edge may be 2**31.
    edges = np.minimum(np.arange(_pages(width, low) + 1, dtype=np.int64) << low, width)
    counts = jnp.diff(places(local, jnp.asarray(edges, jnp.int32)))
    within = _bits.pack(local & ((1 << low) - 1), low)
    return jnp.concatenate([_bits.pack(counts, _COUNT_BITS), within])


def decode(message: jax.Array, slots: int, width: int) -> jax.Array:
    """The inverse of :func:`encode`, ``i32[c]``, with ``width`` for padding."""
    low = low_bits(slots, width)
    count_words = -(-_pages(width, low) * _COUNT_BITS // 32)
    ends = _bits.running_sum(_bits.unpack(message[:count_words], _COUNT_BITS))
    within = _bits.unpack(message[count_words:], low)[:slots]
    slot = jnp.arange(slots, dtype=jnp.int32)
    # Each page that ends at a slot moves it, and all slots after it, one page on.
    marks = jnp.zeros((slots,), jnp.int32).at[ends].add(1, mode="drop")
    page = _bits.running_sum(marks)
    return jnp.where(slot < ends[-1], (page << low) | within, width)


def _pages(width: int, low: int) -> int:
    return -(-width >> low)


def _words(slots: int, width: int, low: int) -> int:
    return -(-_pages(width, low) * _COUNT_BITS // 32) + -(-slots // (32 // low))
