"""Allgather: what all workers own of the selection reaches everyone.

Ok-Topk, section 3.1.2, the last exchange.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._parts import _messages
from sparse_collectives.allreduce.ok_topk._plan import Exchange
from sparse_collectives.padded_coo import PaddedCOO


class Gathered(NamedTuple):
    """All workers' slots, on every worker.

    Attributes:
      total: unique indices, padding in between; the same bits on every worker.
      error: ``f[c]`` over the slots of this worker's entries: what the total misses
        of each. None with an exact codec.
      unsent: ``i32[]``, entries of this worker that the codec had no room for.
      words: what the exchange moved.
    """

    total: PaddedCOO
    error: jax.Array | None
    unsent: jax.Array
    words: _messages.Words


def gather(
    entries: PaddedCOO, *, axis: AxisName, codec: Codec, seed: jax.Array, exchange: Exchange
) -> Gathered:
    """The allgather. The worker that sends an entry also takes it from there."""
    encoded = codec.encode(entries, seed)
    messages = transport.all_gather(encoded.message, axis)
    everyone = codec.decode(messages, entries.size, entries.values.dtype)
    total = PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), entries.size)
    unsent = jnp.zeros((), jnp.int32)
    if not codec.exact:
        unsent = _messages.unsent_count(entries, encoded)
    received = exchange.received(transport.axis_size(axis))
    words = _messages.words_of_pairs(received, entries.count() - unsent, exchange.slots)
    return Gathered(total, None if codec.exact else encoded.error, unsent, words)
