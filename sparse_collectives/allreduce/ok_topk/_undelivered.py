"""What a worker keeps: line 14 of Algorithm 1, with what the encodings cost.

An entry may find no slot on its way to a sum, and a sum none on its way to the
total; a lossy codec rounds both. Where an index is not in the total, every worker
keeps the whole of what it contributed. Where it is, the total differs from what was
sent by the errors of the codec, and each error is kept by the worker that encoded.
"""

import jax
import jax.numpy as jnp

from sparse_collectives._coo import _bitset
from sparse_collectives._types import Undelivered
from sparse_collectives.allreduce._parts import _undelivered
from sparse_collectives.padded_coo import PaddedCOO


def undelivered(
    coo: PaddedCOO,
    sent: jax.Array,
    error: jax.Array | None,
    later: list[tuple[PaddedCOO, jax.Array | None]],
    total: PaddedCOO,
) -> Undelivered:
    """What this worker must keep.

    Args:
      coo: its selection, c slots.
      sent: ``bool[c]``, which slots reached the owners of their regions.
      error: ``f[c]``, what the owners miss of those; None with an exact codec.
      later: for each later exchange, the entries that this worker held and what
        their receivers miss of each.
      total: the result, the same on every worker.

    Returns:
      An answer to each slot of ``coo``; with a codec that is not exact, the slots of
      ``later`` as other entries.
    """
    members = _bitset.insert(_bitset.empty(coo.size), total.indices, coo.size)
    delivered = sent & _bitset.contains(members, coo.indices)
    missing = jnp.zeros_like(coo.values) if error is None else error
    others = [
        _where(_bitset.contains(members, entries.indices) & (missed != 0), missed, entries)
        for entries, missed in later
        if missed is not None
    ]
    return _undelivered.of_slots(coo, jnp.where(delivered, missing, coo.values), others)


def _where(mask: jax.Array, values: jax.Array, entries: PaddedCOO) -> PaddedCOO:
    return PaddedCOO(
        jnp.where(mask, values, jnp.zeros_like(values)),
        jnp.where(mask, entries.indices, entries.size),
        entries.size,
    )
