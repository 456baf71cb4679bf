"""Balance: the selected entries, spread evenly over the workers.

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

from sparse_collectives import _compat, _volumes, transport
from sparse_collectives._coo.compaction import windowed_rank
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


def choose_branch(counts: jax.Array, plan: BalancePlan, axis: AxisName) -> jax.Array:
    """The index into :data:`BRANCHES`, ``i32[]``, equal on all workers and on all of the mesh."""
    flow = ring_flow(counts, plan.capacity)
    fits = jnp.all(counts <= plan.capacity)
    # An entry moves one hop at most, so a worker passes on only its own.
    near = jnp.all(flow <= jnp.minimum(counts, plan.neighbour_capacity))
    even = _spread.most_per_pair(counts, plan.capacity) <= plan.spread_capacity
    # One branch holds a ppermute, in which all devices of a mesh meet.
    fits, near, even = transport.holds_on_mesh(jnp.stack([fits, near, even]), axis)
    return jnp.where(fits, 0, jnp.where(near, 1, jnp.where(even, 2, 3))).astype(jnp.int32)


class Balanced(NamedTuple):
    """Entries, spread evenly.

    Attributes:
      entries: ``plan.capacity`` slots.
      error: ``f[m]`` over the slots of the entries that went in: what the worker
        that now has an entry misses of it. None with an exact codec.
      lost: ``i32[]``, entries that this worker could not pass on.
    """

    entries: PaddedCOO
    error: jax.Array | None
    lost: jax.Array


def balance(
    entries: PaddedCOO,
    counts: jax.Array,
    branch: jax.Array,
    plan: BalancePlan,
    *,
    axis: AxisName,
    codec: Codec,
    seed: jax.Array,
    mode: str = "auto",
    turn: jax.Array | int = 0,
) -> Balanced:
    """Moves entries so that each worker has at most ``plan.capacity`` of them.

    Ascending entries stay ascending, which the codecs that send gaps profit from.

    Args:
      entries: this worker's entries, packed to the front.
      counts: ``i32[P]``, how many each worker has.
      branch: from :func:`choose_branch`.
      plan: the static sizes.
      axis: the workers.
      codec: how a message is encoded.
      seed: ``u32[]``, for the codec.
      mode: ``'auto'``: by ``branch``; ``'always'``: everything by rank; ``'never'``: each
        worker takes of its own what fits.
      turn: ``u32[]``, from :func:`._step.turn`: with ``'never'``, which entries do not fit changes.
    """
    workers, capacity = plan.workers, plan.capacity
    me = transport.axis_index(axis)
    slot = jnp.arange(capacity, dtype=jnp.int32)

    def stay():
        return _result(_take(entries, slot), entries, codec, axis)

    def what_fits():
        rank = windowed_rank(slot, counts[me], capacity, jnp.asarray(turn))
        source = jnp.where(slot < counts[me], rank, entries.capacity)
        lost = jnp.maximum(counts[me] - capacity, 0)
        return _result(_take(entries, source), entries, codec, axis)._replace(lost=lost)

    def send(source: jax.Array, move, kept: jax.Array, senders: jax.Array):
        """Sends the entries at ``source[..., b]``; joins those that came to the ``kept`` first."""
        outgoing = codec.encode(_take(entries, source), seed)
        incoming = codec.decode(move(outgoing.message), entries.size, entries.values.dtype)
        joined = _join(entries, kept, incoming, senders < me, capacity)
        result = _result(joined, entries, codec, axis)
        if codec.exact:
            return result
        error = jnp.zeros_like(entries.values).at[source].set(outgoing.error, mode="drop")
        lost = (source < entries.capacity) & ~outgoing.sent
        return result._replace(error=error, lost=jnp.sum(lost, dtype=jnp.int32))

    def to_neighbour():
        flow = ring_flow(counts, capacity)
        kept, passed = counts[me] - flow[me], flow[me]
        step = jnp.arange(plan.neighbour_capacity, dtype=jnp.int32)
        source = jnp.where(step < passed, kept + step, entries.capacity)
        pairs = [(source, (source + 1) % workers) for source in range(workers)]
        left = (me - 1)[None] % workers
        move = lambda message: transport.ppermute(message, axis, pairs)  # noqa: E731
        return send(source[None], move, kept, left)

    everyone = jnp.arange(workers, dtype=jnp.int32)

    def exchange(message):
        return transport.all_to_all(message, axis)

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
        kept = jnp.minimum(counts[me], capacity)
        return send(source.reshape(workers, block), exchange, kept, everyone)

    def by_rank():
        block = plan.block_capacity
        first = jnp.sum(jnp.where(everyone < me, counts, 0))
        # Slot q of the block for worker d is for entry d * block + q of all.
        source = jnp.arange(workers * block, dtype=jnp.int32).reshape(workers, block) - first
        mine = (source >= 0) & (source < counts[me])
        source = jnp.where(mine, source, entries.capacity)
        return send(source, exchange, jnp.zeros((), jnp.int32), everyone)

    if workers == 1:
        return stay()
    if mode == "always":
        return by_rank()
    # Slots for all k: nothing can be uneven.
    if capacity >= entries.capacity:
        return stay()
    if mode == "never":
        return what_fits()
    return lax.switch(branch, (stay, to_neighbour, to_room, by_rank))


def words_received(
    plan: BalancePlan, pair_words: Callable[[int], int], mode: str = "auto"
) -> tuple[float, ...]:
    """Words of each branch; ``pair_words`` gives those of a message of so many slots."""
    workers = plan.workers
    by_rank = _volumes.all_to_all(pair_words(plan.block_capacity) * workers, workers)
    if mode != "auto":
        return (by_rank if mode == "always" else 0.0,) * len(BRANCHES)
    return (
        0.0,
        _volumes.ppermute(pair_words(plan.neighbour_capacity), workers),
        _volumes.all_to_all(pair_words(plan.spread_capacity) * workers, workers),
        by_rank,
    )


def entries_sent(
    counts: jax.Array, me: jax.Array, plan: BalancePlan, mode: str = "auto"
) -> tuple[jax.Array, ...]:
    """Entries that this worker sends to others in each branch, ``i32[]`` each."""
    mine, block = counts[me], plan.block_capacity
    first = jnp.sum(jnp.where(jnp.arange(plan.workers) < me, counts, 0))
    # Those whose rank is in its own block stay.
    staying = jnp.minimum(first + mine, (me + 1) * block) - jnp.maximum(first, me * block)
    by_rank = mine - jnp.maximum(staying, 0)
    if mode != "auto":
        return (by_rank if mode == "always" else jnp.zeros_like(mine),) * len(BRANCHES)
    return (
        jnp.zeros_like(mine),
        ring_flow(counts, plan.capacity)[me],
        jnp.maximum(mine - plan.capacity, 0),
        by_rank,
    )


def slots_sent(plan: BalancePlan, mode: str = "auto") -> tuple[int, ...]:
    """Slots of the messages to others in each branch, 1 at least."""
    others = max(1, plan.workers - 1)
    if mode != "auto":
        return (others * plan.block_capacity,) * len(BRANCHES)
    spread, block = others * plan.spread_capacity, others * plan.block_capacity
    return 1, plan.neighbour_capacity, spread, block


def _join(
    own: PaddedCOO, kept: jax.Array, incoming: PaddedCOO, is_before: jax.Array, capacity: int
) -> PaddedCOO:
    """The first ``kept`` slots of ``own`` and the entries that came, in ``capacity`` slots.

    Rows of ``incoming`` where ``is_before`` holds come before them, the others after:
    a worker's entries are those of a region, and regions ascend with the workers.
    """
    indices = incoming.indices.reshape(-1)
    arrived = incoming.indices < own.size
    in_front = jnp.sum(arrived & is_before[:, None], dtype=jnp.int32)
    order = jnp.cumsum(arrived.reshape(-1), dtype=jnp.int32) - 1
    order = jnp.where(order < in_front, order, order + kept)
    target = jnp.where(arrived.reshape(-1), order, capacity)
    slot = jnp.arange(capacity, dtype=jnp.int32) - in_front
    joined = _take(own, jnp.where((slot >= 0) & (slot < kept), slot, own.capacity))
    return PaddedCOO(
        joined.values.at[target].set(incoming.values.reshape(-1), mode="drop"),
        joined.indices.at[target].set(indices, mode="drop"),
        own.size,
    )


def _result(moved: PaddedCOO, entries: PaddedCOO, codec: Codec, axis: AxisName) -> Balanced:
    """Without an error; typed as that of any other branch."""
    lost = jnp.zeros((), jnp.int32)
    if codec.exact:
        return Balanced(moved, None, lost)
    error, lost = _compat.to_varying((jnp.zeros_like(entries.values), lost), axis)
    return Balanced(moved, error, lost)


def _take(coo: PaddedCOO, slot: jax.Array) -> PaddedCOO:
    """The given slots of ``coo``; slots past its capacity give padding."""
    values = coo.values.at[slot].get(mode="fill", fill_value=0)
    indices = coo.indices.at[slot].get(mode="fill", fill_value=coo.size)
    return PaddedCOO(values, indices, coo.size)
