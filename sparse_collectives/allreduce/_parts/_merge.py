"""Cuts sparse vectors into blocks, and adds blocks up.

The allreduces that reduce on the way share these functions. Nothing here communicates.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._data import PaddedCOO, sum_dtype, take
from sparse_collectives._platform import by_platform, places
from sparse_collectives._sparse_ops import _bits, _bitset, _compaction

# Running sums beat a sort up to so many owners on a CPU, and up to so many sums on a GPU.
_FEW_OWNERS, _MOST_COUNTED = 8, 1 << 26
# A table has a flag for each of n indices: at most so many for each slot, and so many cells.
_SPARSEST, _MOST_CELLS = 64, 1 << 28


class Blocks(NamedTuple):
    """A selection split by region.

    Attributes:
      coo: PaddedCOO with ``[P, capacity]`` slots; row j is for the owner of region j.
      sent: ``bool[c]`` over the slots of the selection: whether it is in a block.
      source: ``i32[P, capacity]``, the slot of the selection that is in each slot of
        the blocks; c for padding.
      counts: ``i32[P]``, entries for each owner, in the block or left out.
    """

    coo: PaddedCOO
    sent: jax.Array
    source: jax.Array
    counts: jax.Array

    @property
    def filled(self) -> jax.Array:
        """Entries in each block, ``i32[P]``."""
        return jnp.minimum(self.counts, self.source.shape[1])


def split(coo: PaddedCOO, boundaries: jax.Array, capacity: int, turn: jax.Array) -> Blocks:
    """Cuts an ascending selection into one block of ``capacity`` slots for each region.

    Args:
      coo: the selection, c slots.
      boundaries: ``i32[P + 1]``.
      capacity: slots of a block.
      turn: ``u32[]``, from :func:`._hash.turn`: if a region has more entries than slots, the
        entries that wait change from step to step.
    """
    edges = places(coo.indices, boundaries)
    source, sent, counts = _sources(edges, coo.capacity, capacity, turn)
    return Blocks(take(coo, source), sent, source, counts)


def split_by_owner(
    coo: PaddedCOO, owner: jax.Array, workers: int, capacity: int, turn: jax.Array
) -> Blocks:
    """Cuts a selection into one block of ``capacity`` slots for each owner; the order stays.

    Args:
      coo: the selection, c slots.
      owner: ``i32[c]``, P for padding.
      workers: P.
      capacity: slots of a block.
      turn: as for :func:`split`.
    """
    slots = coo.capacity
    by_sorting = functools.partial(_sources_sorted, workers=workers, capacity=capacity)
    by_counting = functools.partial(_sources_counted, workers=workers, capacity=capacity)
    if workers * capacity >= 2**31:  # Counting numbers the slots of all blocks in int32.
        source, sent, counts = by_sorting(owner, turn)
    elif workers <= _FEW_OWNERS:
        source, sent, counts = by_counting(owner, turn)
    elif slots * workers <= _MOST_COUNTED:
        source, sent, counts = by_platform(by_sorting, by_counting, owner, turn)
    else:
        source, sent, counts = by_sorting(owner, turn)
    return Blocks(take(coo, source), sent, source, counts)


def _sources_sorted(owner: jax.Array, turn: jax.Array, *, workers: int, capacity: int):
    slots = owner.shape[0]
    slot = jnp.arange(slots, dtype=jnp.int32)
    bits = max(1, (slots - 1).bit_length())
    if bits + workers.bit_length() <= 32:
        # Owner and slot in one number: sorting one array is several times cheaper.
        key = lax.sort((owner.astype(jnp.uint32) << bits) | slot.astype(jnp.uint32))
        owner, order = key >> bits, (key & ((1 << bits) - 1)).astype(jnp.int32)
    else:
        owner, order = lax.sort((owner, slot), num_keys=1)
    everyone = jnp.arange(workers + 1, dtype=owner.dtype)
    return _sources(places(owner, everyone), slots, capacity, turn, order)


def _sources_counted(owner: jax.Array, turn: jax.Array, *, workers: int, capacity: int):
    """Numbers each slot among the slots of its owner: a running sum for each owner, no sort."""
    slots = owner.shape[0]
    everyone = jnp.arange(workers, dtype=owner.dtype)
    passed = jnp.cumsum(owner[None] == everyone[:, None], axis=1, dtype=jnp.int32)
    counts = passed[:, -1]
    inside = owner < workers
    mine = jnp.minimum(owner, workers - 1)
    rank = jnp.take_along_axis(passed, mine[None], axis=0)[0] - 1
    start, wrapped = _compaction.window(counts, capacity, turn)
    place = _compaction.slot_of_rank(rank, start[mine], wrapped[mine], capacity)
    sent = inside & (place < capacity)
    target = jnp.where(sent, mine * capacity + place, workers * capacity)
    source = jnp.full((workers * capacity,), slots, jnp.int32)
    slot = jnp.arange(slots, dtype=jnp.int32)
    source = source.at[target].set(slot, mode="drop").reshape(workers, capacity)
    return source, sent, counts


def _sources(
    edges: jax.Array,
    slots: int,
    capacity: int,
    turn: jax.Array,
    order: jax.Array | None = None,
):
    """Block j has the slots from edge j to the next one, in ``order`` if it is given.

    Returns:
      The fields of :class:`Blocks` except for the entries.
    """
    start, counts = edges[:-1, None], jnp.diff(edges)[:, None]
    slot = jnp.arange(capacity, dtype=jnp.int32)
    rank = _compaction.windowed_rank(slot[None], counts, capacity, turn)
    source = jnp.where(slot[None] < counts, start + rank, slots)
    if order is not None:
        source = order.at[source].get(mode="fill", fill_value=slots)
    sent = jnp.zeros((slots,), jnp.bool_).at[source.reshape(-1)].set(True, mode="drop")
    return source, sent, counts[:, 0]


def reduce_blocks(
    received: Sequence[PaddedCOO], size: int, dtype, capacity: int | None = None
) -> PaddedCOO:
    """Adds up blocks with common indices.

    A bitset of n bits numbers the members of the union, and values are added into the slot of their
    number, without a sort and with O(slots) random accesses. Rows are added one after the other, so
    that no scatter has an index twice and the same rows give the same bits on every device.

    Args:
      received: PaddedCOOs of ``[b, c]`` slots; the indices of each row are unique.
      size: n.
      dtype: the dtype of the result; sums are made in :func:`sum_dtype`.
      capacity: slots of the result, if the caller has a bound on the union; by default as many
        as were received, n at most.

    Returns:
      An ascending PaddedCOO, padding last.
    """
    slots = sum(block.indices.size for block in received)
    capacity = min(slots, size, slots if capacity is None else capacity)
    rows = functools.partial(_row_by_row, size=size, capacity=capacity, dtype=sum_dtype(dtype))
    table = functools.partial(_in_a_table, size=size, capacity=capacity, dtype=sum_dtype(dtype))
    leaves = [(block.indices, block.values) for block in received]
    cells = capacity * sum(block.indices.shape[0] for block in received)
    if size <= _SPARSEST * slots and cells <= _MOST_CELLS:
        indices, sums = by_platform(rows, table, leaves)
    else:
        indices, sums = rows(leaves)
    return PaddedCOO(sums.astype(dtype), indices, size)


def _row_by_row(blocks, *, size: int, capacity: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Each row is added into the slots of the union, in place."""

    def insert_row(members, row):
        return _bitset.insert(members, row, size)

    def add_row(sums, row):
        slot, values = row
        return sums.at[slot].add(values.astype(sums.dtype), mode="drop")

    members = _bitset.empty(size)
    for indices, _ in blocks:
        members = _fold_rows(insert_row, members, indices)
    ranked = _bitset.rank_index(members)
    union = jnp.full((capacity,), size, jnp.int32)
    sums = jnp.zeros((capacity,), dtype)
    for indices, values in blocks:
        slot = jnp.where(indices < size, _bitset.rank(ranked, indices), capacity)
        union = union.at[slot].set(indices, mode="drop")
        sums = _fold_rows(add_row, sums, (slot, values))
    return union, sums


def _in_a_table(blocks, *, size: int, capacity: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Puts the rows side by side, with a column for each member: no row waits for another.

    Cost: a table of b times as many values as the union has slots.
    """
    indices = jnp.concatenate([indices.reshape(-1) for indices, _ in blocks])
    values = jnp.concatenate([values.reshape(-1).astype(dtype) for _, values in blocks])
    rows, first = [], 0
    for block, _ in blocks:
        of_block = jnp.arange(first, first + block.shape[0], dtype=jnp.int32)
        rows.append(jnp.broadcast_to(of_block[:, None], block.shape).reshape(-1))
        first += block.shape[0]
    is_member = jnp.zeros((size,), jnp.bool_).at[indices].set(True, mode="drop")
    words = _bits.mask_words(lambda start, stop: is_member[start:stop], size)
    ranked = _bitset.rank_index(words)
    slot = jnp.where(indices < size, _bitset.rank(ranked, indices), capacity)
    union = jnp.full((capacity,), size, jnp.int32).at[slot].set(indices, mode="drop")
    table = jnp.zeros((first, capacity), dtype)
    table = table.at[jnp.concatenate(rows), slot].set(values, mode="drop")
    sums = jnp.zeros((capacity,), dtype)
    for each in table:
        sums = sums + each
    return union, sums


def _fold_rows(function, carry: jax.Array, rows):
    """``function(carry, row) -> carry`` over the leading dimension of ``rows``."""
    leaves = jax.tree.leaves(rows)
    if leaves[0].shape[0] == 1:
        return function(carry, jax.tree.map(lambda x: x[0], rows))
    # The scan's carry must have the type of its result from the start.
    carry = carry + jnp.zeros_like(leaves[0].reshape(-1)[0], carry.dtype)
    return lax.scan(lambda carry, row: (function(carry, row), None), carry, rows)[0]
