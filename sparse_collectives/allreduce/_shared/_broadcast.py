"""Broadcast from worker 0, in two halves: a scatter along a tree, and an allgather.

A binomial tree sends the whole message ceil(log2 P) times from its root. Here
the root sends each block of it once, down the same tree, and an allgather puts
the blocks together. That costs the root two messages instead of log2 P of them,
and the result of an allgather is typed as the same on every worker, which
``shard_map(check_vma=True)`` can't know of the result of a ``ppermute``.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import _volumes, transport
from sparse_collectives._types import AxisName


def from_first(message: jax.Array, axis: AxisName) -> jax.Array:
    """The message of worker 0, on every worker.

    Args:
      message: ``i32[w]``; that of the other workers is not looked at.
      axis: the workers.

    Returns:
      ``i32[w]``. Cost: about ``w (P-1)/P + w log2(P) / (2 P)`` words received as a
      mean over the workers, 2 w at most by any of them; ceil(log2 P) messages and
      an allgather.
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


def words_received(words: int, workers: int) -> float:
    """Words that :func:`from_first` makes each worker receive, as a mean."""
    if workers == 1:
        return 0.0
    block, spans = _plan(words, workers)
    down = sum(_volumes.ppermute(span * block, workers, _pairs(span, workers)) for span in spans)
    return down + _volumes.all_gather(block, workers)


def _plan(words: int, workers: int) -> tuple[int, list[int]]:
    """Words of a block, and how many blocks are sent on at each level."""
    levels = (workers - 1).bit_length()
    return -(-words // workers), [1 << level for level in reversed(range(levels))]


def _pairs(span: int, workers: int) -> list[tuple[int, int]]:
    return [(w, w + span) for w in range(0, workers - span, 2 * span)]
