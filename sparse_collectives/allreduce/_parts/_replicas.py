"""Results that every worker has, with the type of a replicated value.

After a butterfly every worker holds the same bits, but the program does not show it: under
``shard_map(check_vma=True)`` the result of a ``ppermute`` is typed as varying. Only a collective
makes a replicated type, and the cheapest is an allgather to which each of Q holders gives its share
of the slots: L (P-1)/Q words for a total of L words. If types are not checked, nothing is moved.

A result of worker 0 alone takes a scatter along a tree, and an allgather. A binomial tree sends the
whole message ceil(log2 P) times from its root. Here the root sends each block of it once, down the
same tree, and an allgather joins the blocks. This costs the root two messages instead of log2 P,
and the result has the replicated type.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _varying, transport, wire
from sparse_collectives._data import PaddedCOO, take
from sparse_collectives._types import AxisName, ReduceInfo, Undelivered
from sparse_collectives.allreduce._parts import _messages
from sparse_collectives.allreduce._parts._stream import Stream
from sparse_collectives.transport import _dispatch


def share(total: Stream, axis: AxisName, holders: int) -> Stream:
    """Types the total as the same on every worker.

    Args:
      total: the same on the first ``holders`` workers.
      axis: the workers.
      holders: how many workers give a share; the others receive only.

    Returns:
      The total; if it has pairs, with up to ``holders - 1`` more slots of padding.
    """
    codec, me, seed = wire.raw(), transport.axis_index(axis), jnp.uint32(0)
    part = -(-_slots_of(total) // holders)
    if not isinstance(total, PaddedCOO):
        # The shares of the other workers are ignored.
        whole = jnp.pad(total, (0, holders * part - total.shape[0]))
        mine = lax.dynamic_slice_in_dim(whole, jnp.minimum(me, holders - 1) * part, part)
        gathered = transport.all_gather(codec.encode_dense(mine, seed)[0], axis)
        everyone = codec.decode_dense(gathered[:holders], part, total.dtype)
        return everyone.reshape(-1)[: total.shape[0]]
    slot = me * part + jnp.arange(part, dtype=jnp.int32)
    slot = jnp.where(me < holders, slot, total.capacity)
    gathered = transport.all_gather(codec.encode(take(total, slot), seed).message, axis)
    everyone = codec.decode(gathered[:holders], total.size, total.values.dtype)
    return PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), total.size)


def shared_words(total: Stream, holders: int, workers: int) -> tuple[float, jax.Array]:
    """Words that :func:`share` makes each worker receive, and how many of them are not padding."""
    codec, part = wire.raw(), -(-_slots_of(total) // holders)
    if not isinstance(total, PaddedCOO):
        words = _dispatch.words_of_all_gather(
            _messages.dense_words(codec, part, total.dtype), workers
        )
        return words, jnp.float32(words * holders / workers)
    message = _messages.pair_words(codec, part, total.size, total.values.dtype)
    words = _dispatch.words_of_all_gather(message, workers)
    # Each of the holders has its part of the entries, and the others send padding.
    return words, _messages.useful_words(
        words, total.count(), workers * (total.capacity // holders)
    )


def _slots_of(total: Stream) -> int:
    return total.capacity if isinstance(total, PaddedCOO) else total.shape[0]


def of_one_worker(coo: PaddedCOO, axis: AxisName) -> tuple[PaddedCOO, Undelivered, ReduceInfo]:
    """P = 1: the total is the selection, nothing is kept, and no word is received."""
    total = coo
    if _varying.checks_varying(axis):
        total = cast(PaddedCOO, share(coo, axis, 1))
    return total, Undelivered.of(coo), ReduceInfo.of(total, 0.0)


def from_first(message: jax.Array, axis: AxisName) -> jax.Array:
    """The message of worker 0, on every worker.

    Args:
      message: ``i32[w]``; the messages of other workers are ignored.
      axis: the workers.

    Returns:
      ``i32[w]``. Cost: about ``w (P-1)/P + w log2(P) / (2 P)`` words received as a mean over the
      workers, 2 w at most by any of them; ceil(log2 P) messages and an allgather.
    """
    workers = transport.axis_size(axis)
    if workers == 1:
        return message
    me = transport.axis_index(axis)
    block, spans = _plan(message.shape[0], workers)
    # Worker v holds the blocks from v on, half as many after each round.
    held = jnp.pad(message, (0, 2 * spans[0] * block - message.shape[0]))
    for span in spans:
        pairs = _pairs(span, workers)
        came = transport.ppermute(held[span * block :], axis, pairs)
        held = jnp.where(me % (2 * span) == span, came, held[: span * block])
    return transport.all_gather(held, axis).reshape(-1)[: message.shape[0]]


def words_from_first(words: int, workers: int) -> float:
    """Words that :func:`from_first` makes each worker receive, as a mean."""
    if workers == 1:
        return 0.0
    block, spans = _plan(words, workers)
    down = sum(
        _dispatch.words_of_ppermute(span * block, workers, _pairs(span, workers)) for span in spans
    )
    return down + _dispatch.words_of_all_gather(block, workers)


def _plan(words: int, workers: int) -> tuple[int, list[int]]:
    """Words of a block, and how many blocks are sent on at each level."""
    levels = (workers - 1).bit_length()
    return -(-words // workers), [1 << level for level in reversed(range(levels))]


def _pairs(span: int, workers: int) -> list[tuple[int, int]]:
    return [(w, w + span) for w in range(0, workers - span, 2 * span)]
