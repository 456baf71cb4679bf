"""Balance and allgather: the selected entries, spread evenly, reach everyone.

Ok-Topk, section 3.1.2. The allgather moves as many slots from each worker as
the fullest one needs, so entries are first moved from workers that selected
many to workers that selected few.

Deviation: the paper balances where the largest count is over four times the
mean. Messages here have a fixed size, so what counts is whether each worker's
entries fit its slots of the allgather, and there are three cases, chosen by the
counts that all workers know:

0. all fit: nothing moves;
1. the surplus fits when each worker passes a few entries to its right
   neighbour: one ``ppermute``;
2. otherwise entry r of all (in the order of the workers) goes to worker
   r // ceil(k / P): one ``all_to_all``, which fits whatever the counts are.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _words, transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.padded_coo import PaddedCOO

BRANCHES = ("none", "neighbours", "all_to_all")


class BalancePlan(NamedTuple):
    """The static sizes of one exchange.

    Attributes:
      workers: P.
      capacity: slots of each worker in the allgather.
      neighbour_capacity: slots of the message to the right neighbour.
      block_capacity: slots of a block of the all_to_all, ceil(k / P).
    """

    workers: int
    capacity: int
    neighbour_capacity: int
    block_capacity: int


def make_plan(k: int, workers: int, slack: float) -> BalancePlan:
    """Sizes for k entries over P workers, with ``slack`` times k / P slots each."""
    block = math.ceil(k / workers)
    capacity = min(k, math.ceil(slack * k / workers))
    # At most k (P-1) / (2 P) words: with the default slacks a step that moves
    # entries to neighbours stays within 6k (P-1)/P words for every P.
    neighbour = min(capacity, max(1, k * (workers - 1) // (4 * workers)))
    return BalancePlan(workers, max(capacity, block), neighbour, block)


def ring_flow(counts: jax.Array, capacity: int) -> jax.Array:
    """How many entries each worker passes to the right, ``i32[P]``.

    The smallest f >= 0 with f[w] = max(0, f[w-1] + counts[w] - capacity) around
    the ring: a worker keeps what it has room for and passes on the rest. Two laps
    of a running maximum, since the surplus may come around.
    """
    workers = counts.shape[0]
    surplus = jnp.tile(counts - capacity, 2)
    total = jnp.cumsum(surplus)
    lowest = jnp.minimum(lax.cummin(total), 0)
    return (total - lowest)[workers:]


def choose_branch(counts: jax.Array, plan: BalancePlan) -> jax.Array:
    """The index into :data:`BRANCHES`, ``i32[]``, equal on all workers."""
    flow = ring_flow(counts, plan.capacity)
    fits = jnp.all(counts <= plan.capacity)
    # An entry moves one hop at most, so a worker passes on only its own.
    near = jnp.all(flow <= jnp.minimum(counts, plan.neighbour_capacity))
    return jnp.where(fits, 0, jnp.where(near, 1, 2)).astype(jnp.int32)


def balance(
    entries: PaddedCOO,
    counts: jax.Array,
    branch: jax.Array,
    plan: BalancePlan,
    *,
    axis: AxisName,
    codec: Codec,
) -> PaddedCOO:
    """Moves entries so that each worker has at most ``plan.capacity`` of them.

    Args:
      entries: this worker's entries, packed to the front.
      counts: ``i32[P]``, how many each worker has.
      branch: from :func:`choose_branch`.
      plan: the static sizes.
      axis: the workers.
      codec: how a message is encoded.

    Returns:
      A PaddedCOO of ``plan.capacity`` slots.
    """
    workers, capacity = plan.workers, plan.capacity
    me = transport.axis_index(axis)
    slot = jnp.arange(capacity, dtype=jnp.int32)

    def stay():
        return _take(entries, slot)

    def to_neighbour():
        flow = ring_flow(counts, capacity)
        kept, passed, received = counts[me] - flow[me], flow[me], flow[(me - 1) % workers]
        step = jnp.arange(plan.neighbour_capacity, dtype=jnp.int32)
        outgoing = _take(entries, jnp.where(step < passed, kept + step, entries.capacity))
        pairs = [(source, (source + 1) % workers) for source in range(workers)]
        incoming = _decode(transport.ppermute(codec.encode(outgoing), axis, pairs), entries, codec)
        own = _take(entries, jnp.where(slot < kept, slot, entries.capacity))
        target = jnp.where(step < received, kept + step, capacity)
        return PaddedCOO(
            own.values.at[target].set(incoming.values, mode="drop"),
            own.indices.at[target].set(incoming.indices, mode="drop"),
            entries.size,
        )

    def by_rank():
        block = plan.block_capacity
        first = jnp.sum(jnp.where(jnp.arange(workers) < me, counts, 0))
        # Slot q of the block for worker d is for entry d * block + q of all.
        source = jnp.arange(workers * block, dtype=jnp.int32).reshape(workers, block) - first
        mine = (source >= 0) & (source < counts[me])
        outgoing = _take(entries, jnp.where(mine, source, entries.capacity))
        incoming = _decode(transport.all_to_all(codec.encode(outgoing), axis), entries, codec)
        # Each slot is filled by one worker at most; the others sent padding.
        indices = jnp.min(incoming.indices, axis=0)
        filled = incoming.indices < entries.size
        values = jnp.sum(jnp.where(filled, incoming.values, 0), axis=0, dtype=entries.values.dtype)
        return _take(PaddedCOO(values, indices, entries.size), slot)

    # One worker, or slots for all k: nothing can be uneven.
    if workers == 1 or capacity >= entries.capacity:
        return stay()
    return lax.switch(branch, (stay, to_neighbour, by_rank))


def gather(entries: PaddedCOO, *, axis: AxisName, codec: Codec) -> PaddedCOO:
    """All workers' slots, on every worker; unique indices, padding in between."""
    words = transport.all_gather(codec.encode(entries), axis)
    everyone = codec.decode(words, entries.size, entries.values.dtype)
    return PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), entries.size)


def words_received(
    plan: BalancePlan, neighbour_words: int, block_words: int
) -> tuple[float, float, float]:
    """Words of each branch, given those of one message and of one block."""
    return (
        0.0,
        _words.ppermute(neighbour_words, plan.workers),
        _words.all_to_all(block_words * plan.workers, plan.workers),
    )


def _take(coo: PaddedCOO, slot: jax.Array) -> PaddedCOO:
    """The given slots of ``coo``; slots past its capacity give padding."""
    values = coo.values.at[slot].get(mode="fill", fill_value=0)
    indices = coo.indices.at[slot].get(mode="fill", fill_value=coo.size)
    return PaddedCOO(values, indices, coo.size)


def _decode(words: jax.Array, like: PaddedCOO, codec: Codec) -> PaddedCOO:
    return codec.decode(words, like.size, like.values.dtype)
