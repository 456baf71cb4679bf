"""Split and reduce: every region's entries go to its owner, who adds them up.

Ok-Topk, section 3.1.1. Each worker sends to each owner one block with a fixed
number of slots. Entries that do not fit wait in the residual of their worker.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _volumes, transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._parts import _messages
from sparse_collectives.allreduce._parts._merge import reduce_blocks, split
from sparse_collectives.padded_coo import PaddedCOO


class Reduced(NamedTuple):
    """What the split and reduce did.

    Attributes:
      entries: the sums of the region that this worker owns, ascending.
      sent: ``bool[c]`` over the slots of the selection: whether its owner has it.
      error: ``f[c]``, what the owner misses of an entry that was sent; None with an
        exact codec.
      exchanged: ``i32[]``, entries sent to other workers.
    """

    entries: PaddedCOO
    sent: jax.Array
    error: jax.Array | None
    exchanged: jax.Array


def exchange(
    words: jax.Array, axis: AxisName, *, schedule: str, bucket_size: int
) -> Iterator[jax.Array]:
    """Sends row j of ``words[P, w]`` to worker j; yields what came, in buckets.

    Each item is ``i32[b, w]``, rows in the order of the distance from the sender:
    first that of the worker before, and so on around the ring. That order is the
    same for both schedules, so they give the same bits. A worker's own row is left
    out.

    ``rotation`` (Figure 2 of the paper): at distance s worker i sends to worker
    i + s, so no worker is the target of two messages at once; the messages of a
    bucket do not depend on one another and may be in flight together, and the
    reduction of one bucket overlaps the exchange of the next.
    ``all_to_all``: one collective, one bucket.
    """
    workers = words.shape[0]
    me = transport.axis_index(axis)
    if schedule == "all_to_all":
        received = transport.all_to_all(words, axis)
        yield received[(me - jnp.arange(1, workers)) % workers]
        return
    distances = range(1, workers)
    for first in range(0, len(distances), bucket_size):
        bucket = []
        for distance in distances[first : first + bucket_size]:
            block = lax.dynamic_slice_in_dim(words, (me + distance) % workers, 1)
            pairs = [(source, (source + distance) % workers) for source in range(workers)]
            bucket.append(transport.ppermute(block, axis, pairs))
        yield jnp.concatenate(bucket)


def split_and_reduce(
    coo: PaddedCOO,
    boundaries: jax.Array,
    turn: jax.Array,
    *,
    axis: AxisName,
    codec: Codec,
    seed: jax.Array,
    capacity: int,
    schedule: str,
    bucket_size: int,
) -> Reduced:
    """Algorithm 1, line 8, for two workers or more."""
    blocks = split(coo, boundaries, capacity, turn)
    encoded = codec.encode(blocks.coo, seed)
    me = transport.axis_index(axis)
    # A worker's own block takes no part in the exchange, so nothing is rounded.
    own = jax.tree.map(lambda rows: lax.dynamic_slice_in_dim(rows, me, 1), blocks.coo)
    received = [own] + [
        codec.decode(bucket, coo.size, coo.values.dtype)
        for bucket in exchange(encoded.message, axis, schedule=schedule, bucket_size=bucket_size)
    ]
    exchanged = _messages.to_others(encoded.sent, me)
    sent = blocks.source < coo.capacity
    error = None
    if not codec.exact:
        is_own = jnp.arange(sent.shape[0])[:, None] == me
        sent = sent & (encoded.sent | is_own)
        error = _to_slots(jnp.where(is_own, 0, encoded.error), blocks.source, coo.capacity)
    sent = _to_slots(sent, blocks.source, coo.capacity)
    return Reduced(reduce_blocks(received, coo.size, coo.values.dtype), sent, error, exchanged)


def _to_slots(rows: jax.Array, source: jax.Array, slots: int) -> jax.Array:
    """From blocks back to the slots that they were cut from; 0 for those not in a block."""
    flat = jnp.zeros((slots,), rows.dtype)
    return flat.at[source.reshape(-1)].set(rows.reshape(-1), mode="drop")


def words_received(block_words: int, workers: int) -> float:
    """Words that the exchange makes each worker receive, padding included."""
    return _volumes.all_to_all(block_words * workers, workers)
