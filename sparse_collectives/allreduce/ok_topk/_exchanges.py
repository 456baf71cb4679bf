"""The exchanges of pairs of a step: split and reduce, and the allgather.

Ok-Topk, section 3.1.1: every region's entries go to its owner, who adds them up. Each worker sends
to each owner one block with a fixed number of slots. Entries that do not fit wait in the residual
of their worker. Section 3.1.2, the last exchange: all workers gather the selected sums of all
owners.

Deviation: the messages of the paper have the size of their contents, which is the lower end of its
Table 1. A program's messages have static sizes. It holds an exchange for each of a few sizes, of
which a step takes the shortest that is enough. All workers choose the same one, by counts that all
of them have.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _data, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._shared import _messages
from sparse_collectives.allreduce._shared._merge import Blocks, reduce_blocks
from sparse_collectives.allreduce.ok_topk._plan import Collective
from sparse_collectives.transport import _dispatch


class Reduced(NamedTuple):
    """The result of the split and reduce.

    Attributes:
      entries: the sums of the region that this worker owns, ascending.
      sent: ``bool[c]`` over the slots of the selection: whether its owner has it.
      overflow: ``i32[]``, entries of the selection that were not sent.
      error: ``f[c]``, the part of a sent entry that the owner misses; None if
        nothing was rounded.
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

    Each item is ``i32[b, w]``, its rows ordered by the distance to their sender:
    first the message of the worker before this one, and so on around the ring. The
    order is the same for both schedules, so they give the same bits. A worker's own
    row is left out.

    ``rotation`` (Figure 2 of the paper): at distance s, worker i sends to worker
    i + s, so no worker is the target of two messages at once. The messages of a
    bucket do not depend on one another and may be in flight together; the messages of
    the next one wait until they have arrived. No message waits for a computation on a
    bucket, so a bucket may be reduced while the next one is under way.
    ``all_to_all``: one collective, one bucket.
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
    exchanges: Sequence[Collective],
    owned_slots: int,
    schedule: str,
    messages_in_flight: int,
) -> Reduced:
    """Algorithm 1, line 8.

    Args:
      coo: this worker's selection.
      cut: makes one block for each owner, with the slots of the last of ``exchanges``.
      axis: the workers.
      codec: how a block is encoded.
      seed: ``u32[]``, for the codec.
      exchanges: one for each size that the messages may have, ascending. With several, the workers
        exchange the sizes that their largest blocks need, and take the shortest that is enough.
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

    def through(exchange: Collective):
        rows = jax.tree.map(lambda x: x[:, : exchange.slots], blocks.coo)
        encoded = codec.encode(rows, seed)
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
        room = ((0, 0), (0, blocks.source.shape[1] - exchange.slots))
        error = None
        if not codec.exact:
            error = jnp.pad(jnp.where(is_own, 0, encoded.error), room)
        return entries, jnp.pad(encoded.sent, room), error

    occupied = blocks.source < coo.capacity
    which = jnp.zeros((), jnp.int32)
    if len(exchanges) > 1:
        largest = jnp.max(jnp.where(is_own[:, 0], 0, blocks.filled))
        most = jnp.max(transport.all_gather(largest, axis))
        # A rotation consists of ppermutes, in which all devices of a mesh meet.
        which = shortest(most, exchanges, lambda fit: transport.holds_on_mesh(fit, axis))
    (entries, there, error), words_of = run(which, exchanges, through, workers)
    # With an exact codec all entries of a block are sent, and not counted again.
    filled = blocks.filled if codec.exact else jnp.sum(there, axis=1, dtype=jnp.int32)
    words = words_of(jnp.sum(filled, dtype=jnp.int32) - filled[me])
    if len(exchanges) > 1:
        told = _messages.words_in_full(_dispatch.words_of_all_gather(1, workers))
        words = _messages.words_in_all(words, told)
    entries = PaddedCOO(entries.values[0].astype(dtype), entries.indices[0], size)
    sent, given = blocks.sent, blocks.filled
    if not codec.exact:
        rows = occupied & (there | is_own)
        given = jnp.sum(rows, axis=1, dtype=jnp.int32)
        sent = _to_slots(rows, blocks.source, coo.capacity)
        error = _to_slots(error, blocks.source, coo.capacity)
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
    most: jax.Array,
    *,
    axis: AxisName,
    codec: Codec,
    seed: jax.Array,
    exchanges: Sequence[Collective],
) -> Gathered:
    """The allgather. A worker takes its own entries from it as well.

    Args:
      entries: the entries of this worker, packed to the front.
      held: ``i32[]``, the number of these.
      most: ``i32[]``, the largest number of entries of a worker; all workers have it.
      axis: the workers.
      codec: how a message is encoded.
      seed: ``u32[]``, for the codec.
      exchanges: one for each size that a message may have, ascending; the shortest that has room
        for all workers' entries is chosen.
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
        everyone = _data.widen(everyone, width)
        total = PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), size)
        if codec.exact:
            return total, jnp.zeros((), jnp.int32), None
        return (
            total,
            _messages.unsent_count(mine, encoded),
            jnp.pad(encoded.error, (0, slots - exchange.slots)),
        )

    which = shortest(most, exchanges)
    found, words = run(which, exchanges, through, transport.axis_size(axis))
    total, unsent, error = found
    return Gathered(total, error, unsent, words(held - unsent))


def shortest(
    most: jax.Array,
    exchanges: Sequence[Collective],
    agreed: Callable[[jax.Array], jax.Array] = lambda fit: fit,
) -> jax.Array:
    """The number of the first exchange with room for ``most`` entries, or of the last, ``i32[]``.

    Args:
      most: ``i32[]``, equal on all workers.
      exchanges: in the order of their sizes, ascending.
      agreed: maps flags to whether each holds for all workers that take part in the exchange.
    """
    smaller = jnp.asarray([each.slots for each in exchanges[:-1]], jnp.int32)
    return jnp.sum(~agreed(most <= smaller), dtype=jnp.int32)


def run(
    which: jax.Array,
    exchanges: Sequence[Collective],
    through: Callable[[Collective], Any],
    workers: int,
) -> tuple[Any, Callable[[jax.Array], _messages.Words]]:
    """``through`` the exchange ``which``, and a function from the entries sent to its words."""
    result = lax.switch(which, [lambda each=each: through(each) for each in exchanges])

    def words(entries: jax.Array) -> _messages.Words:
        of_each = [
            _messages.words_of_pairs(each.received(workers), entries, each.slots_sent(workers))
            for each in exchanges
        ]
        return jax.tree.map(lambda *x: jnp.stack(x)[which], *of_each)

    return result, words
