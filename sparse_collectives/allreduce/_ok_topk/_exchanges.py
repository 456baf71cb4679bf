"""The exchanges of pairs of a step: split and reduce, and the allgather.

Ok-Topk, section 3.1.1: every region's entries go to its owner, who adds them up. Each worker sends
to each owner one block with a fixed number of slots. Entries that do not fit wait in the residual
of their worker. Section 3.1.2, the last exchange: all workers gather the selected sums of all
owners.

Deviation: the messages of the paper have the size of their contents, which is the lower end of its
Table 1. A program's messages have static sizes.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _data, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._ok_topk._plan import Collective
from sparse_collectives.allreduce._parts import _messages
from sparse_collectives.allreduce._parts._merge import Blocks, reduce_blocks


class Reduced(NamedTuple):
    """The result of the split and reduce.

    Attributes:
      entries: the sums of the region that this worker owns, ascending.
      sent: ``bool[c]`` over the slots of the selection: whether its owner has it.
      overflow: ``i32[]``, entries of the selection that were not sent.
      error: ``f[c]``, the part of a sent entry that the owner misses; None if nothing was rounded.
      words: the words that the exchange moved.
    """

    entries: PaddedCOO
    sent: jax.Array
    overflow: jax.Array
    error: jax.Array | None
    words: _messages.Words


def send_blocks(
    messages: jax.Array, axis: AxisName, *, schedule: str, messages_in_flight: int
) -> Iterator[jax.Array]:
    """Sends row j of ``messages[P, w]`` to worker j; yields the arrivals, in buckets.

    Each item is ``i32[b, w]``, its rows ordered by the distance to their sender: first the message
    of the worker before this one, and so on around the ring. The order is the same for both
    schedules, so they give the same bits. A worker's own row is left out.

    ``rotation`` (Figure 2 of the paper): at distance s, worker i sends to worker i + s, so no
    worker is the target of two messages at once. The messages of a bucket do not depend on one
    another and may be in flight together; the messages of the next one wait until they have
    arrived. No message waits for a computation on a bucket, so a bucket may be reduced while the
    next one is under way. ``all_to_all``: one collective, one bucket.
    """
    workers = messages.shape[0]
    me = transport.axis_index(axis)
    if schedule == "all_to_all":
        received = transport.all_to_all(messages, axis)
        yield received[(me - jnp.arange(1, workers, dtype=jnp.int32)) % workers]
        return
    distances = range(1, workers)
    for first in range(0, len(distances), messages_in_flight):
        bucket = []
        for distance in distances[first : first + messages_in_flight]:
            block = lax.dynamic_slice_in_dim(messages, (me + distance) % workers, 1)
            pairs = [(source, (source + distance) % workers) for source in range(workers)]
            bucket.append(transport.ppermute(block, axis, pairs))
        yield jnp.concatenate(bucket)
        messages, _ = lax.optimization_barrier((messages, bucket))


def split_and_reduce(
    coo: PaddedCOO,
    cut: Callable[[PaddedCOO], Blocks],
    *,
    axis: AxisName,
    codec: Codec,
    seed: jax.Array,
    exchange: Collective,
    owned_slots: int,
    schedule: str,
    messages_in_flight: int,
) -> Reduced:
    """Algorithm 1, line 8.

    Args:
      coo: this worker's selection.
      cut: makes one block for each owner, with the slots of ``exchange``.
      axis: the workers.
      codec: how a block is encoded.
      seed: ``u32[]``, for the codec.
      exchange: the message.
      owned_slots: slots of the result.
      schedule: see :func:`send_blocks`.
      messages_in_flight: see :func:`send_blocks`.
    """
    workers = transport.axis_size(axis)
    if workers == 1:
        none = jnp.zeros((), jnp.int32)
        return Reduced(coo, coo.indices < coo.size, none, None, _messages.no_words())
    blocks = cut(coo)
    size, dtype = blocks.coo.size, coo.values.dtype
    me = transport.axis_index(axis)
    is_own = jnp.arange(workers, dtype=jnp.int32)[:, None] == me
    # A worker's own block takes no part in the exchange, so nothing is rounded.
    own = jax.tree.map(lambda rows: lax.dynamic_slice_in_dim(rows, me, 1), blocks.coo)

    encoded = codec.encode(blocks.coo, seed)
    buckets = send_blocks(
        encoded.message, axis, schedule=schedule, messages_in_flight=messages_in_flight
    )
    entries = own
    for bucket in buckets:
        # A bucket is added when it has arrived. The sums are made in the order of the rows, so
        # they have the same bits in however many buckets the rows come.
        parts = [entries, codec.decode(bucket, size, dtype)]
        entries = reduce_blocks(parts, size, jnp.float32, owned_slots)
        entries = jax.tree.map(lambda x: x[None], entries)
    entries = _data.widen(entries, owned_slots)
    occupied = blocks.source < coo.capacity
    # With an exact codec all entries of a block are sent, and not counted again.
    filled = blocks.filled if codec.exact else jnp.sum(encoded.sent, axis=1, dtype=jnp.int32)
    words = words_of(exchange, jnp.sum(filled, dtype=jnp.int32) - filled[me], workers)
    entries = PaddedCOO(entries.values[0].astype(dtype), entries.indices[0], size)
    sent, given, error = blocks.sent, blocks.filled, None
    if not codec.exact:
        rows = occupied & (encoded.sent | is_own)
        given = jnp.sum(rows, axis=1, dtype=jnp.int32)
        sent = _to_slots(rows, blocks.source, coo.capacity)
        error = _to_slots(jnp.where(is_own, 0, encoded.error), blocks.source, coo.capacity)
    overflow = jnp.sum(blocks.counts - given, dtype=jnp.int32)
    return Reduced(entries, sent, overflow, error, words)


def _to_slots(rows: jax.Array, source: jax.Array, slots: int) -> jax.Array:
    """Maps blocks back to the slots that they were cut from; 0 for slots not in a block."""
    flat = jnp.zeros((slots,), rows.dtype)
    return flat.at[source.reshape(-1)].set(rows.reshape(-1), mode="drop")


class Gathered(NamedTuple):
    """All workers' slots, on every worker.

    Attributes:
      total: unique indices, padding in between; the same bits on every worker.
      error: ``f[c]`` over the slots of this worker's entries: the part of each that the
        total misses. None with an exact codec.
      unsent: ``i32[]``, entries of this worker that the codec had no room for.
      words: the words that the exchange moved.
    """

    total: PaddedCOO
    error: jax.Array | None
    unsent: jax.Array
    words: _messages.Words


def gather(
    entries: PaddedCOO,
    held: jax.Array,
    *,
    axis: AxisName,
    codec: Codec,
    seed: jax.Array,
    exchange: Collective,
) -> Gathered:
    """The allgather. A worker takes its own entries from it as well.

    Args:
      entries: the entries of this worker, packed to the front.
      held: ``i32[]``, the number of these.
      axis: the workers.
      codec: how a message is encoded.
      seed: ``u32[]``, for the codec.
      exchange: the message.
    """
    encoded = codec.encode(entries, seed)
    gathered = transport.all_gather(encoded.message, axis)
    everyone = codec.decode(gathered, entries.size, entries.values.dtype)
    total = PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), entries.size)
    unsent, error = jnp.zeros((), jnp.int32), None
    if not codec.exact:
        unsent, error = _messages.unsent_count(entries, encoded), encoded.error
    words = words_of(exchange, held - unsent, transport.axis_size(axis))
    return Gathered(total, error, unsent, words)


def words_of(exchange: Collective, entries: jax.Array, workers: int) -> _messages.Words:
    """The words of an exchange in which this worker sent so many entries to others."""
    received, slots = exchange.received(workers), exchange.slots_sent(workers)
    return _messages.words_of_pairs(received, entries, slots)
