"""A total that every worker has computed by itself, in the type that says so.

After a butterfly every worker holds the same bits, but a program can't know it:
under ``shard_map(check_vma=True)`` the result of a ``ppermute`` is typed as
varying. Only a collective makes a replicated type, and the cheapest is an
allgather to which each of Q holders gives its share of the slots: L (P-1)/Q words
for a total of L words. Where types are not checked nothing is moved.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _compat, _volumes, transport, wire
from sparse_collectives._types import AxisName, ReduceInfo, Undelivered
from sparse_collectives.allreduce._shared import _messages, _undelivered
from sparse_collectives.allreduce._shared._stream import Stream
from sparse_collectives.padded_coo import PaddedCOO


def share(total: Stream, axis: AxisName, holders: int) -> Stream:
    """The total, typed as the same on every worker.

    Args:
      total: the same on the first ``holders`` workers.
      axis: the workers.
      holders: how many workers give a share; the others receive only.

    Returns:
      As ``total``; one of pairs with up to ``holders - 1`` more slots of padding.
    """
    codec, me, seed = wire.raw(), transport.axis_index(axis), jnp.uint32(0)
    part = share_slots(_slots_of(total), holders)
    if not isinstance(total, PaddedCOO):
        # What the others give is not looked at.
        whole = jnp.pad(total, (0, holders * part - total.shape[0]))
        mine = lax.dynamic_slice_in_dim(whole, jnp.minimum(me, holders - 1) * part, part)
        gathered = transport.all_gather(codec.encode_dense(mine, seed)[0], axis)
        everyone = codec.decode_dense(gathered[:holders], part, total.dtype)
        return everyone.reshape(-1)[: total.shape[0]]
    slot = me * part + jnp.arange(part, dtype=jnp.int32)
    slot = jnp.where(me < holders, slot, total.capacity)
    mine = PaddedCOO(
        total.values.at[slot].get(mode="fill", fill_value=0),
        total.indices.at[slot].get(mode="fill", fill_value=total.size),
        total.size,
    )
    gathered = transport.all_gather(codec.encode(mine, seed).message, axis)
    everyone = codec.decode(gathered[:holders], total.size, total.values.dtype)
    return PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), total.size)


def share_slots(slots: int, holders: int) -> int:
    """Slots that each holder gives."""
    return -(-slots // holders)


def shared_words(total: Stream, holders: int, workers: int) -> tuple[float, jax.Array]:
    """Words that :func:`share` makes each worker receive, and how many are no padding."""
    codec, part = wire.raw(), share_slots(_slots_of(total), holders)
    if not isinstance(total, PaddedCOO):
        words = _volumes.all_gather(_messages.dense_words(codec, part, total.dtype), workers)
        return words, jnp.float32(words * holders / workers)
    message = _messages.pair_words(codec, part, total.size, total.values.dtype)
    words = _volumes.all_gather(message, workers)
    # Each of the holders has its part of the entries, and the others send padding.
    return words, _messages.useful_words(
        words, total.count(), workers * (total.capacity // holders)
    )


def _slots_of(total: Stream) -> int:
    return total.capacity if isinstance(total, PaddedCOO) else total.shape[0]


def of_one_worker(coo: PaddedCOO, axis: AxisName) -> tuple[PaddedCOO, Undelivered, ReduceInfo]:
    """P = 1: the total is the selection, nothing is kept, and no word is received."""
    total = coo
    if _compat.checks_varying(axis):
        total = cast(PaddedCOO, share(coo, axis, 1))
    info = ReduceInfo(
        delivered=total.count(),
        overflow=jnp.zeros((), jnp.int32),
        threshold=jnp.zeros((), jnp.float32),
        words=jnp.zeros((), jnp.float32),
        useful=jnp.zeros((), jnp.float32),
    )
    return total, _undelivered.nothing(coo), info
