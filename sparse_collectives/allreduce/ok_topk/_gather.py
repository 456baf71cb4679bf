"""Allgather: what all workers own of the selection reaches everyone.

Ok-Topk, section 3.1.2, the last exchange.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import padded_coo, transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._shared import _messages
from sparse_collectives.allreduce.ok_topk import _sizes
from sparse_collectives.allreduce.ok_topk._plan import Collective
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
    entries: PaddedCOO,
    held: jax.Array,
    most: jax.Array,
    *,
    axis: AxisName,
    codec: Codec,
    seed: jax.Array,
    exchanges: Sequence[Collective],
) -> Gathered:
    """The allgather. The worker that sends an entry also takes it from there.

    Args:
      entries: of this worker, packed to the front.
      held: ``i32[]``, how many they are.
      most: ``i32[]``, how many a worker has at most; all workers know it.
      axis: the workers.
      codec: how a message is encoded.
      seed: ``u32[]``, for the codec.
      exchanges: of the sizes that a message may have, ascending; the shortest that has room
        for everyone's entries is chosen.
    """
    slots, size, dtype = entries.capacity, entries.size, entries.values.dtype

    def decoded(exchange: Collective) -> PaddedCOO:
        mine = jax.tree.map(lambda x: x[: exchange.slots], entries)
        return codec.decode(codec.encode(mine, seed).message, size, dtype)

    # A codec may decode more slots than it encodes: its escapes become padding.
    width = max(jax.eval_shape(functools.partial(decoded, each)).capacity for each in exchanges)

    def through(exchange: Collective):
        mine = jax.tree.map(lambda x: x[: exchange.slots], entries)
        encoded = codec.encode(mine, seed)
        everyone = codec.decode(transport.all_gather(encoded.message, axis), size, dtype)
        everyone = padded_coo.widen(everyone, width)
        total = PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), size)
        if codec.exact:
            return total, jnp.zeros((), jnp.int32), None
        return (
            total,
            _messages.unsent_count(mine, encoded),
            jnp.pad(encoded.error, (0, slots - exchange.slots)),
        )

    which = _sizes.shortest(most, exchanges)
    found, words = _sizes.run(which, exchanges, through, transport.axis_size(axis))
    total, unsent, error = found
    return Gathered(total, error, unsent, words(held - unsent))
