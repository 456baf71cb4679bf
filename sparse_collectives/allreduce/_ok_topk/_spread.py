"""Deals out surplus entries for which the neighbors have no room.

Every worker has some surplus or some room. The surplus entries of all workers are numbered in the
order of the workers, and the free slots level by level: the first free slot of each worker that has
one, then the second of each, and so on. Entry g goes to slot g. Thus the surplus of one worker is
dealt out in turn to all that have room, and an all_to_all with small blocks carries it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._sparse_ops import _bits, _compaction


def most_per_pair(counts: jax.Array, capacity: int) -> jax.Array:
    """An upper bound of the entries that any worker deals to any other, ``i32[]``.

    A worker whose surplus spans l levels deals at most l to each. Cost: P^2 log(capacity).
    """
    free = jnp.maximum(capacity - counts, 0)
    surplus = jnp.maximum(counts - capacity, 0)
    first = jnp.cumsum(surplus, dtype=jnp.int32) - surplus
    last = first + surplus - 1
    levels = _level(last, free, capacity) - _level(first, free, capacity) + 1
    return jnp.max(jnp.where(surplus > 0, levels, 0))


def deal(
    counts: jax.Array, me: jax.Array, capacity: int, entry: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The places of this worker's surplus entries.

    Args:
      counts: ``i32[P]``, how many entries each worker has.
      me: ``i32[]``, this worker.
      capacity: how many each may have.
      entry: ``i32[...]``, numbers of surplus entries of this worker, from 0.

    Returns:
      The worker to which each goes, and which slot of the block for it, ``i32[...]`` each.
    """
    workers = counts.shape[0]
    surplus = jnp.maximum(counts - capacity, 0)
    before = jnp.arange(workers, dtype=jnp.int32) < me
    first = jnp.sum(jnp.where(before, surplus, 0), dtype=jnp.int32)
    level = jnp.arange(capacity, dtype=jnp.int32)[:, None]
    free = (level < (capacity - counts)[None, :]).reshape(-1)
    words = _bits.mask_words(lambda start, stop: free[start:stop], free.shape[0])
    place, _ = _compaction.nth_position(words, first + entry)
    start, _ = _compaction.nth_position(words, first[None])
    # A worker gets at most one entry for each level, so levels are distinct slots.
    return place % workers, place // workers - start[0] // workers


def _level(rank: jax.Array, free: jax.Array, capacity: int) -> jax.Array:
    """The level of free slot number ``rank[...]``: the largest with that many below."""

    def slots_below(level):
        free_of_each = lax.expand_dims(free, range(level.ndim))
        return jnp.sum(jnp.minimum(free_of_each, level[..., None]), axis=-1, dtype=jnp.int32)

    low, high = jnp.zeros_like(rank), jnp.full_like(rank, capacity)
    for _ in range(capacity.bit_length()):
        middle = (low + high + 1) // 2
        enough = slots_below(middle) <= rank
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)
    return low
