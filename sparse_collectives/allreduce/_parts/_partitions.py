"""n indices dealt out to P owners in small blocks.

Block b belongs to partition b mod P, and the indices after the last whole round of blocks are
dealt out in runs of equal length. All partitions then have similar contents: a selection of
k/P entries from each is about the k largest of all, and the threshold of one partition is a
good guess for the next.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._platform import once

# Indices of a block: 4 KB of float32, so that memory is read in long runs.
BLOCK = 1024
# A partition has at least so many blocks, if it has at least as many indices.
_BLOCKS = 32


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
