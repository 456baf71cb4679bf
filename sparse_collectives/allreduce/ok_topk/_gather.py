"""Allgather: what all workers own of the selection reaches everyone.

Ok-Topk, section 3.1.2, the last exchange.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.padded_coo import PaddedCOO


class Gathered(NamedTuple):
    """All workers' slots, on every worker.

    Attributes:
      total: unique indices, padding in between; the same bits on every worker.
      error: ``f[c]`` over the slots of this worker's entries: what the total misses
        of each. None with an exact codec.
      lost: ``i32[]``, entries of this worker that are not in the total.
    """

    total: PaddedCOO
    error: jax.Array | None
    lost: jax.Array


def gather(entries: PaddedCOO, *, axis: AxisName, codec: Codec, seed: jax.Array) -> Gathered:
    """The allgather. The worker that sends an entry takes it from there, too."""
    encoded = codec.encode(entries, seed)
    words = transport.all_gather(encoded.message, axis)
    everyone = codec.decode(words, entries.size, entries.values.dtype)
    total = PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), entries.size)
    if codec.exact:
        return Gathered(total, None, jnp.zeros((), jnp.int32))
    lost = (entries.indices < entries.size) & ~encoded.sent
    return Gathered(total, encoded.error, jnp.sum(lost, dtype=jnp.int32))
