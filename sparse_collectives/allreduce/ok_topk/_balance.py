"""Balance and allgather: the selected entries, spread evenly, reach everyone.

Ok-Topk, section 3.1.2. The allgather moves as many slots from each worker as
the fullest one needs, so entries are first moved from workers that selected
many to workers that selected few.

Deviation: the paper balances where the largest count is over four times the
mean. Messages here have a fixed size, so what counts is whether each worker's
entries fit its slots of the allgather, and there are four cases, chosen by the
counts that all workers know:

0. all fit: nothing moves;
1. the surplus fits when each worker passes a few entries to its right
   neighbour: one ``ppermute``;
2. the surplus is dealt out to all that have room (:mod:`._spread`): one
   ``all_to_all`` with blocks of a quarter of ceil(k / P);
3. otherwise entry r of all (in the order of the workers) goes to worker
   r // ceil(k / P): one ``all_to_all``, which fits whatever the counts are.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _words, transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce.ok_topk import _spread
from sparse_collectives.padded_coo import PaddedCOO

BRANCHES = ("none", "neighbours", "spread", "all_to_all")


class BalancePlan(NamedTuple):
    """The static sizes of one exchange.

    Attributes:
      workers: P.
      capacity: slots of each worker in the allgather.
      neighbour_capacity: slots of the message to the right neighbour.
      spread_capacity: slots of a block of the all_to_all of the surplus.
      block_capacity: slots of a block of the all_to_all of everything, ceil(k / P).
    """

    workers: int
    capacity: int
    neighbour_capacity: int
    spread_capacity: int
    block_capacity: int


def make_plan(k: int, workers: int, slack: float) -> BalancePlan:
    """Sizes for k entries over P workers, with ``slack`` times k / P slots each."""
    block = math.ceil(k / workers)
    capacity = k if slack >= workers else min(k, math.ceil(slack * k / workers))
    # Both messages are at most k (P-1) / (2 P) words: with the default slacks a
    # step that moves a surplus stays within 6k (P-1)/P words for every P.
    neighbour = min(capacity, max(1, k * (workers - 1) // (4 * workers)))
    return BalancePlan(workers, max(capacity, block), neighbour, max(1, block // 4), block)


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
    even = _spread.most_per_pair(counts, plan.capacity) <= plan.spread_capacity
    return jnp.where(fits, 0, jnp.where(near, 1, jnp.where(even, 2, 3))).astype(jnp.int32)


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
        kept, passed = counts[me] - flow[me], flow[me]
        step = jnp.arange(plan.neighbour_capacity, dtype=jnp.int32)
        outgoing = _take(entries, jnp.where(step < passed, kept + step, entries.capacity))
        pairs = [(source, (source + 1) % workers) for source in range(workers)]
        incoming = _decode(
            transport.ppermute(_message(outgoing, codec), axis, pairs), entries, codec
        )
        own = _take(entries, jnp.where(slot < kept, slot, entries.capacity))
        return _append(own, kept, incoming)

    def to_room():
        block = plan.spread_capacity
        surplus = jnp.arange(min(entries.capacity, workers * block), dtype=jnp.int32)
        place = _spread.deal(counts, me, capacity, surplus)
        target = jnp.where(surplus < counts[me] - capacity, place.worker * block + place.slot, -1)
        # The entry for each slot of the blocks, by scattering the entries' numbers.
        source = jnp.full((workers * block,), entries.capacity, jnp.int32)
        source = source.at[jnp.where(target < 0, workers * block, target)].set(
            capacity + surplus, mode="drop"
        )
        outgoing = _take(entries, source.reshape(workers, block))
        incoming = _decode(transport.all_to_all(_message(outgoing, codec), axis), entries, codec)
        return _append(_take(entries, slot), jnp.minimum(counts[me], capacity), incoming)

    def by_rank():
        block = plan.block_capacity
        first = jnp.sum(jnp.where(jnp.arange(workers) < me, counts, 0))
        # Slot q of the block for worker d is for entry d * block + q of all.
        source = jnp.arange(workers * block, dtype=jnp.int32).reshape(workers, block) - first
        mine = (source >= 0) & (source < counts[me])
        outgoing = _take(entries, jnp.where(mine, source, entries.capacity))
        incoming = _decode(transport.all_to_all(_message(outgoing, codec), axis), entries, codec)
        # Each slot is filled by one worker at most; the others sent padding.
        indices = jnp.min(incoming.indices, axis=0)
        filled = incoming.indices < entries.size
        values = jnp.sum(jnp.where(filled, incoming.values, 0), axis=0, dtype=entries.values.dtype)
        return _take(PaddedCOO(values, indices, entries.size), slot)

    # One worker, or slots for all k: nothing can be uneven.
    if workers == 1 or capacity >= entries.capacity:
        return stay()
    return lax.switch(branch, (stay, to_neighbour, to_room, by_rank))


def gather(entries: PaddedCOO, *, axis: AxisName, codec: Codec) -> PaddedCOO:
    """All workers' slots, on every worker; unique indices, padding in between."""
    words = transport.all_gather(_message(entries, codec), axis)
    everyone = codec.decode(words, entries.size, entries.values.dtype)
    return PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), entries.size)


def words_received(
    plan: BalancePlan, pair_words: Callable[[int], int]
) -> tuple[float, float, float, float]:
    """Words of each branch; ``pair_words`` gives those of a message of so many slots."""
    workers = plan.workers
    return (
        0.0,
        _words.ppermute(pair_words(plan.neighbour_capacity), workers),
        _words.all_to_all(pair_words(plan.spread_capacity) * workers, workers),
        _words.all_to_all(pair_words(plan.block_capacity) * workers, workers),
    )


def _append(own: PaddedCOO, count: jax.Array, incoming: PaddedCOO) -> PaddedCOO:
    """``own``, of which ``count`` slots are used, and the entries that came."""
    indices = incoming.indices.reshape(-1)
    arrived = indices < own.size
    order = jnp.cumsum(arrived, dtype=jnp.int32) - 1
    target = jnp.where(arrived, count + order, own.capacity)
    return PaddedCOO(
        own.values.at[target].set(incoming.values.reshape(-1), mode="drop"),
        own.indices.at[target].set(indices, mode="drop"),
        own.size,
    )


def _take(coo: PaddedCOO, slot: jax.Array) -> PaddedCOO:
    """The given slots of ``coo``; slots past its capacity give padding."""
    values = coo.values.at[slot].get(mode="fill", fill_value=0)
    indices = coo.indices.at[slot].get(mode="fill", fill_value=coo.size)
    return PaddedCOO(values, indices, coo.size)


def _message(coo: PaddedCOO, codec: Codec) -> jax.Array:
    return codec.encode(coo, jnp.uint32(0)).message


def _decode(words: jax.Array, like: PaddedCOO, codec: Codec) -> PaddedCOO:
    return codec.decode(words, like.size, like.values.dtype)
