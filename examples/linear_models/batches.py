"""The batches of a worker, with the indices of each batch's gradient worked out once.

Which rows make a batch never changes, only the order of the batches does. So where the gradient of
a batch is not 0 is known from the data, and a step only has to compute the values there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_matrix

from .data import Source
from .group import OWN, SAME, Group


class Batch(NamedTuple):
    """The rows of one worker in one batch, in slots that are as many for all of them.

    Attributes:
      indices: ``i32[c]``, the features that occur, ascending; n marks padding.
      rows: ``i32[m]``, the row of each nonzero; r marks padding.
      slots: ``i32[m]``, where its feature is in ``indices``; c marks padding.
      values: ``f32[m]``.
      labels: ``f32[r]``, -1 or 1; 0 for padding.
    """

    indices: jax.Array
    rows: jax.Array
    slots: jax.Array
    values: jax.Array
    labels: jax.Array


class Fit(NamedTuple):
    """How many slots have room for every batch of every worker.

    Attributes:
      selection: c, of a gradient.
      block: of the entries of one worker's gradient in one of P equal ranges of indices.
      region: of the union of all gradients in such a range.
      union: of the union of all gradients.
    """

    selection: int
    block: int
    region: int
    union: int


class Batches(NamedTuple):
    """All batches, on the devices.

    Attributes:
      parts: one ``OWN`` :class:`Batch` for each.
      counts: the rows in each batch, those of all workers together.
      size: n.
      fit: of the messages.
      largest_row: the largest squared length of a row.
    """

    parts: list[Batch]
    counts: list[int]
    size: int
    fit: Fit
    largest_row: float


def make(source: Source, group: Group, rows: int) -> Batches:
    """Cuts a source into batches of ``rows`` rows for each worker; the last one may be shorter.

    Cost: a sort of the nonzeros of each batch, once; and an allgather of the indices of each
    batch, from which the workers learn how large unions are.
    """
    together = rows * group.workers
    starts = range(0, source.count, together)
    made = [
        [_pack(*_taken(source, start + worker * rows, rows), rows) for worker in group.mine]
        for start in starts
    ]
    needs = [(len(b.indices), len(b.rows), length) for pairs in made for b, length in pairs]
    selection, nonzeros, largest_row = group.largest([max(each) for each in zip(*needs)])
    slots, nonzeros = int(selection), int(nonzeros)
    parts = []
    for pairs in made:
        parts.append(group.own([_padded(b, source.size, slots, nonzeros) for b, _ in pairs]))
        pairs.clear()  # the devices have them now
    counts = [min(together, source.count - start) for start in starts]
    fit = _fit([part.indices for part in parts], source.size, slots, group)
    return Batches(parts, counts, source.size, fit, largest_row)


def _taken(source: Source, start: int, rows: int) -> tuple[csr_matrix, np.ndarray]:
    start = min(start, source.count)
    return source.rows(start, min(start + rows, source.count)) if start < source.count else _none()


def _none() -> tuple[csr_matrix, np.ndarray]:
    return csr_matrix((0, 1), dtype=np.float32), np.zeros(0, np.float32)


def _pack(matrix: csr_matrix, labels: np.ndarray, rows: int) -> tuple[Batch, float]:
    """Rows without padding but for the labels, and the largest squared length of one."""
    lengths = np.diff(matrix.indptr)
    row = np.repeat(np.arange(len(labels), dtype=np.int32), lengths)
    indices, slots = np.unique(matrix.indices, return_inverse=True)
    squares = np.bincount(row, matrix.data.astype(np.float64) ** 2, minlength=1)
    batch = Batch(
        indices=indices.astype(np.int32),
        rows=row,
        slots=slots.astype(np.int32),
        values=matrix.data.astype(np.float32),
        labels=np.pad(labels, (0, rows - len(labels))),
    )
    return batch, float(squares.max())


def _padded(batch: Batch, size: int, slots: int, nonzeros: int) -> Batch:
    more, rows = nonzeros - len(batch.rows), len(batch.labels)
    return Batch(
        indices=np.pad(batch.indices, (0, slots - len(batch.indices)), constant_values=size),
        rows=np.pad(batch.rows, (0, more), constant_values=rows),
        slots=np.pad(batch.slots, (0, more), constant_values=slots),
        values=np.pad(batch.values, (0, more)),
        labels=batch.labels,
    )


def _fit(indices: Sequence[Any], size: int, slots: int, group: Group) -> Fit:
    """What the unions of the batches need, found by the workers from all their indices."""
    from sparse_collectives import transport

    width = -(-size // group.workers)
    edges = np.minimum(np.arange(group.workers + 1) * width, size).astype(np.int32)

    def counts(own: jax.Array) -> tuple[jax.Array]:
        everyone = transport.all_gather(own, group.axis)
        blocks = jnp.diff(jax.vmap(lambda row: jnp.searchsorted(row, edges))(everyone))
        ascending = jnp.sort(everyone.reshape(-1))
        is_new = jnp.diff(ascending, prepend=-1) > 0
        before = jnp.pad(jnp.cumsum(is_new, dtype=jnp.int32), (1, 0))
        regions = jnp.diff(before[jnp.searchsorted(ascending, edges)])
        return (jnp.stack([jnp.max(blocks), jnp.max(regions), jnp.sum(regions)]),)

    run = group.jit(counts, [OWN], [SAME])
    found = np.stack([np.asarray(run(own)[0]) for own in indices])
    block, region, union = found.max(axis=0).tolist()
    return Fit(slots, max(1, block), max(1, region), max(1, union))
