"""A total that every worker has computed by itself, in the type that says so.

After a butterfly every worker holds the same bits, but a program can't know it:
under ``shard_map(check_vma=True)`` the result of a ``ppermute`` is typed as
varying. Only a collective makes a replicated type, and the cheapest is an
allgather to which each of Q holders gives its share of the slots: L (P-1)/Q words
for a total of L words. Where types are not checked nothing is moved.
"""

import jax.numpy as jnp

from sparse_collectives import _compat, _volumes, transport, wire
from sparse_collectives._types import AxisName, ReduceInfo, Undelivered
from sparse_collectives.allreduce._parts import _messages, _undelivered
from sparse_collectives.padded_coo import PaddedCOO


def share(total: PaddedCOO, axis: AxisName, holders: int) -> PaddedCOO:
    """The total, typed as the same on every worker.

    Args:
      total: the same on the first ``holders`` workers.
      axis: the workers.
      holders: how many workers give a share; the others receive only.

    Returns:
      As ``total``, with up to ``holders - 1`` more slots of padding.
    """
    part = share_slots(total.capacity, holders)
    me = transport.axis_index(axis)
    slot = me * part + jnp.arange(part, dtype=jnp.int32)
    slot = jnp.where(me < holders, slot, total.capacity)
    mine = PaddedCOO(
        total.values.at[slot].get(mode="fill", fill_value=0),
        total.indices.at[slot].get(mode="fill", fill_value=total.size),
        total.size,
    )
    codec = wire.raw()
    gathered = transport.all_gather(codec.encode(mine, jnp.uint32(0)).message, axis)
    everyone = codec.decode(gathered[:holders], total.size, total.values.dtype)
    return PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), total.size)


def share_slots(slots: int, holders: int) -> int:
    """Slots that each holder gives."""
    return -(-slots // holders)


def words_received(slots: int, size: int, dtype, holders: int, workers: int) -> float:
    """Words that :func:`share` makes each worker receive."""
    part = share_slots(slots, holders)
    return _volumes.all_gather(_messages.pair_words(wire.raw(), part, size, dtype), workers)


def of_one_worker(coo: PaddedCOO, axis: AxisName) -> tuple[PaddedCOO, Undelivered, ReduceInfo]:
    """P = 1: the total is the selection, nothing is kept, and no word is received."""
    total = share(coo, axis, 1) if _compat.checks_varying(axis) else coo
    info = ReduceInfo(
        delivered=total.count(),
        overflow=jnp.zeros((), jnp.int32),
        threshold=jnp.zeros((), jnp.float32),
        words=jnp.zeros((), jnp.float32),
        useful=jnp.zeros((), jnp.float32),
    )
    return total, _undelivered.nothing(coo), info
