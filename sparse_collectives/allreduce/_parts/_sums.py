"""Full sums: the values of all workers at an index that any of them selected.

Every worker has the same indices. Each adds all its values there, and keeps only what clipping
removed.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bitset
from sparse_collectives._types import AxisName, Undelivered
from sparse_collectives.allreduce._parts import _frame
from sparse_collectives.transport import _dispatch


def sum_at(
    indices: jax.Array,
    acc: jax.Array | None,
    coo: PaddedCOO,
    axis: AxisName,
    gives: jax.Array | None = None,
) -> tuple[PaddedCOO, Undelivered]:
    """One psum of the values of all workers at ``indices``.

    Args:
      indices: ``i32[K]``, the same on every worker, unique but for padding.
      acc: ``f[n]``, the values of this worker. None: only its selection, and it neither
        contributes nor clears any other entry.
      coo: its selection.
      axis: the workers.
      gives: ``bool[]``, whether this worker contributes anything; None: it does.

    Returns:
      The total, in the order of the indices and the same on every worker, and what this worker
      keeps.
    """
    workers, size = transport.axis_size(axis), coo.size
    held = coo.to_dense() if acc is None else acc
    # Unsigned, because jax tests for each signed index whether it counts from the end.
    mine = held.at[indices.astype(jnp.uint32)].get(mode="fill", fill_value=0)
    if gives is not None:
        mine = jnp.where(gives, mine, 0)
    sent = _frame.within_range(mine, workers)
    total = transport.psum(sent.astype(jnp.float32), axis)
    kept = jnp.where(sent == mine, 0, mine - sent)
    # A sum that is not finite reaches all workers, and no worker keeps it.
    kept = jnp.where(jnp.isfinite(total), kept, 0).astype(coo.values.dtype)
    total = jnp.where(indices < size, total, 0).astype(coo.values.dtype)
    cleared = indices
    if acc is None:
        selected = _bitset.insert(_bitset.empty(size), coo.indices, size)
        cleared = jnp.where(_bitset.contains(selected, indices), indices, size)
    if gives is not None:
        cleared = jnp.where(gives, cleared, size)
    undelivered = Undelivered.of(coo, coo.values)
    undelivered = undelivered._replace(rest_at_total=PaddedCOO(kept, cleared, size))
    return PaddedCOO(total, indices, size), undelivered


def sum_words(slots: int, workers: int) -> float:
    """Words that :func:`sum_at` makes each worker receive."""
    return _dispatch.words_of_all_reduce(slots, workers)
