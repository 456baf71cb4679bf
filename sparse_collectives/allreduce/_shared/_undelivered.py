"""How an allreduce says what a worker must keep."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparse_collectives import padded_coo
from sparse_collectives._coo import _bitset
from sparse_collectives._types import Undelivered
from sparse_collectives.allreduce._shared import _merge
from sparse_collectives.padded_coo import PaddedCOO


def of_slots(coo: PaddedCOO, slots: jax.Array, others: Sequence[PaddedCOO] = ()) -> Undelivered:
    """``slots f[c]`` of the selection ``coo``, and any number of other entries."""
    none = padded_coo.empty(coo.size, 0, coo.values.dtype)
    return Undelivered(slots, _merge.concatenate(others) if others else none)


def nothing(coo: PaddedCOO, others: Sequence[PaddedCOO] = ()) -> Undelivered:
    """Nothing of the selection ``coo`` itself."""
    return of_slots(coo, jnp.zeros_like(coo.values), others)


def by_total(
    coo: PaddedCOO,
    sent: jax.Array,
    error: jax.Array | None,
    later: Sequence[tuple[PaddedCOO, jax.Array | None]],
    total: PaddedCOO,
) -> Undelivered:
    """What is not in the total stays with all who had it; what it misses, where it was lost.

    An entry may find no slot on its way to a sum, and a sum none on its way to the
    total; a lossy codec rounds both. Where an index is not in the total, every worker
    keeps the whole of what it contributed. Where it is, the total differs from what was
    sent by what was cut off or rounded off on the way, and that is kept by the worker
    that did it.

    Args:
      coo: this worker's selection, c slots.
      sent: ``bool[c]``, which slots were sent, or went on with this worker.
      error: ``f[c]``, what the receivers miss of those; None: nothing.
      later: for each later exchange, the entries that this worker held and what
        their receivers miss of each.
      total: the result, the same on every worker.

    Returns:
      An answer to each slot of ``coo``; the slots of ``later`` as other entries.
    """
    members = _bitset.of_unique(total.indices, coo.size)
    delivered = sent & _bitset.contains(members, coo.indices)
    missing = jnp.zeros_like(coo.values) if error is None else error
    others = [
        _where(_bitset.contains(members, entries.indices) & (missed != 0), missed, entries)
        for entries, missed in later
        if missed is not None
    ]
    return of_slots(coo, jnp.where(delivered, missing, coo.values), others)


def _where(mask: jax.Array, values: jax.Array, entries: PaddedCOO) -> PaddedCOO:
    return PaddedCOO(
        jnp.where(mask, values, jnp.zeros_like(values)),
        jnp.where(mask, entries.indices, entries.size),
        entries.size,
    )
