"""Hashed regions: owners that no data can crowd.

Regions of consecutive indices are as uneven as the data: a worker whose mass lies in one layer has
most of its entries for one owner, and boundaries that are averaged over the workers suit none of
them if the workers differ. Here ownership does not depend on the data (balanced parallelism, as in
Zen, OSDI 2025). The indices are cut into rows of P consecutive ones, of which every worker owns
one: index i of row r = i // P belongs to worker

    (i + turn(r)) mod P,

where turn(r) is a hash of the row and of the step. Therefore adjacent indices have
different owners, and rows are independent of each other: of m entries, an owner has
m / P on average, with a spread of at most about sqrt(m / P), whether they lie in one
layer, in one worker or all over. The hash differs at every step, so the entries that
crowd an owner, if a few do, change from step to step.

An index also has a *position*: positions number the indices of one owner after the other,
each by row. In positions a region is a run, as the rest of the algorithm expects it, and an
owner's indices have the density that they have in the whole vector, so the codecs that
send gaps pay nothing. Both mappings are bijections of 0 to n - 1; nothing is stored.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import _hash
from sparse_collectives._data import PaddedCOO
from sparse_collectives.allreduce._parts import _merge


def starts(size: int, workers: int) -> jax.Array:
    """The positions at which the regions begin and end, ``i32[P + 1]``."""
    rows, rest = divmod(size, workers)
    ends = [worker * rows + min(worker, rest) for worker in range(workers + 1)]
    return jnp.asarray(ends, jnp.int32)


def row_and_owner(
    indices: jax.Array, size: int, workers: int, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The row and the owner of each index, ``i32[...]`` each; padding has no meaningful result."""
    row = indices // workers
    column = indices - row * workers
    return row, (column + _turn(row, size, workers, step)) % workers


def split(
    coo: PaddedCOO, workers: int, capacity: int, step: jax.Array, turn: jax.Array
) -> _merge.Blocks:
    """One block of ``capacity`` slots for each owner; the indices in it are rows.

    Cost: a hash for each slot, and a sort of one u32 array of as many slots.
    """
    row, owner = row_and_owner(coo.indices, coo.size, workers, step)
    owner = jnp.where(coo.indices < coo.size, owner, workers)
    blocks = _merge.split_by_owner(coo, owner, workers, capacity, turn)
    width = -(-coo.size // workers)
    rows = row.at[blocks.source].get(mode="fill", fill_value=width)
    return blocks._replace(coo=PaddedCOO(blocks.coo.values, rows, width))


def to_positions(rows: PaddedCOO, size: int, workers: int, owner: jax.Array) -> PaddedCOO:
    """The entries of ``owner`` at their positions instead of their rows."""
    positions = starts(size, workers)[owner] + rows.indices
    return PaddedCOO(rows.values, jnp.where(rows.indices < rows.size, positions, size), size)


def to_indices(coo: PaddedCOO, workers: int, step: jax.Array) -> PaddedCOO:
    """Moves entries from positions, in any order, to their indices."""
    rows, rest = divmod(coo.size, workers)
    position = coo.indices
    # The first `rest` owners have an index in the last row, which is incomplete.
    wide = rest * (rows + 1)
    beyond = jnp.maximum(position - wide, 0)
    owner = jnp.where(position < wide, position // (rows + 1), rest + beyond // max(rows, 1))
    row = position - (owner * rows + jnp.minimum(owner, rest))
    indices = _index(row, owner, coo.size, workers, step)
    return PaddedCOO(coo.values, jnp.where(position < coo.size, indices, coo.size), coo.size)


def from_rows(
    rows: PaddedCOO, size: int, workers: int, owner: jax.Array, step: jax.Array
) -> PaddedCOO:
    """The entries of ``owner i32[...]``, broadcast to the slots, at indices instead of rows."""
    indices = _index(rows.indices, owner, size, workers, step)
    return PaddedCOO(rows.values, jnp.where(rows.indices < rows.size, indices, size), size)


def _index(row: jax.Array, owner: jax.Array, size: int, workers: int, step: jax.Array) -> jax.Array:
    """The index that an owner has in a row, ``i32[...]``."""
    return row * workers + (owner - _turn(row, size, workers, step)) % workers


def _turn(row: jax.Array, size: int, workers: int, step: jax.Array) -> jax.Array:
    """How far the owners of a row are turned, ``i32[...]`` in 0 to P - 1."""
    turn = _hash.random_bits(step, row) % jnp.uint32(workers)
    # In an incomplete row the first workers own one index each.
    return jnp.where(row < size // workers, turn.astype(jnp.int32), 0)
