"""Balancing: the selected entries are spread evenly over the workers.

Ok-Topk, section 3.1.2. The allgather moves as many slots from each worker as the fullest one needs,
so entries are first moved from workers that selected many to workers that selected few.

Deviation: the paper balances if the largest count is over four times the
mean, as in case 3 below; this is the mode ``'paper'``. Messages here have a fixed
size, so it matters whether each worker's entries fit its slots of the allgather,
and there are four cases, chosen by the counts, which all workers have:

0. all fit: nothing moves;
1. the surplus fits if each worker passes a few entries to its right neighbor: one ``ppermute``;
2. the surplus is dealt out to all workers that have room (:mod:`._spread`): one
   ``all_to_all`` with blocks of a quarter of ceil(k / P);
3. otherwise entry r of all m, in the order of the workers, goes to worker
   r // ceil(m / P), so that all have equal shares: one ``all_to_all``
   with blocks of ceil(k / P) slots, which fits whatever the counts are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _varying, transport
from sparse_collectives._data import PaddedCOO, take
from sparse_collectives._sparse_ops._compaction import windowed_rank
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._ok_topk import _spread
from sparse_collectives.allreduce._ok_topk._exchanges import words_of
from sparse_collectives.allreduce._ok_topk._plan import Collective, Plan
from sparse_collectives.allreduce._parts import _messages

# The paper balances if the largest count is over so many times the mean.
_GATE = 4


def ring_flow(counts: jax.Array, capacity: int) -> jax.Array:
    """How many entries each worker passes to the right, ``i32[P]``.

    The smallest f >= 0 with f[w] = max(0, f[w-1] + counts[w] - capacity) around
    the ring: a worker keeps as many entries as fit, and passes on the rest. It takes
    two laps of a running maximum, since a surplus may travel all the way around.
    """
    workers = counts.shape[0]
    surplus = jnp.tile(counts - capacity, 2)
    total = jnp.cumsum(surplus, dtype=jnp.int32)
    lowest = jnp.minimum(lax.cummin(total), 0)
    return (total - lowest)[workers:]


def choose_branch(
    counts: jax.Array, plan: Plan, axis: AxisName, *, paper: bool = False
) -> jax.Array:
    """The index into ``_plan.BRANCHES``, ``i32[]``, equal on all workers and on the whole mesh.

    Args:
      counts: ``i32[P]``, how many entries each worker has.
      plan: the slots.
      axis: the workers.
      paper: everything by rank if one worker has over four times the mean, or more entries than
        slots of the allgather.
    """
    if paper:
        most, total = jnp.max(counts), jnp.sum(counts.astype(jnp.float32))
        even = most.astype(jnp.float32) <= _GATE * total / plan.workers
        stays = even & (most <= plan.gather_slots)
        stays = transport.holds_on_mesh(stays[None], axis)[0]
        return jnp.where(stays, 0, 3).astype(jnp.int32)
    flow = ring_flow(counts, plan.gather_slots)
    fits = jnp.all(counts <= plan.gather_slots)
    # An entry moves one hop at most, so a worker passes on only its own.
    near = jnp.all(flow <= jnp.minimum(counts, plan.neighbour_slots))
    even = _spread.most_per_pair(counts, plan.gather_slots) <= plan.spread_slots
    # One branch holds a ppermute, in which all devices of a mesh meet.
    fits, near, even = transport.holds_on_mesh(jnp.stack([fits, near, even]), axis)
    return jnp.where(fits, 0, jnp.where(near, 1, jnp.where(even, 2, 3))).astype(jnp.int32)


class Balanced(NamedTuple):
    """The entries after balancing.

    Attributes:
      entries: ``plan.gather_slots`` slots.
      error: ``f[m]`` over the slots of the entries that went in: the part of each that the
        worker that now holds it misses. None with an exact codec.
      unsent: ``i32[]``, entries that this worker could not pass on.
      words: the words that the exchange moved.
    """

    entries: PaddedCOO
    error: jax.Array | None
    unsent: jax.Array
    words: _messages.Words


def balance(
    entries: PaddedCOO,
    counts: jax.Array,
    branch: jax.Array,
    plan: Plan,
    *,
    axis: AxisName,
    codec: Codec,
    seed: jax.Array,
    exchanges: Sequence[Collective | None],
    mode: str = "auto",
    turn: jax.Array | int = 0,
) -> Balanced:
    """Moves entries so that each worker has at most ``plan.gather_slots`` of them.

    Ascending entries stay ascending, which suits the codecs that send gaps.

    Args:
      entries: this worker's entries, packed to the front.
      counts: ``i32[P]``, how many each worker has.
      branch: from :func:`choose_branch`.
      plan: the slots.
      axis: the workers.
      codec: how a message is encoded.
      seed: ``u32[]``, for the codec.
      exchanges: the message of each branch.
      mode: ``'auto'`` and ``'paper'``: by ``branch``; ``'always'``: everything by rank;
        ``'never'``: each worker takes as many of its own as fit.
      turn: ``u32[]``, from :func:`._hash.turn`: with ``'never'``, the entries that do not fit
        change from step to step.
    """
    workers, capacity = plan.workers, plan.gather_slots
    me = transport.axis_index(axis)
    slot = jnp.arange(capacity, dtype=jnp.int32)

    def stay():
        return _result(take(entries, slot), entries, codec, axis)

    def what_fits():
        rank = windowed_rank(slot, counts[me], capacity, jnp.asarray(turn))
        source = jnp.where(slot < counts[me], rank, entries.capacity)
        moved, error, _ = _result(take(entries, source), entries, codec, axis)
        return moved, error, jnp.maximum(counts[me] - capacity, 0)

    def send(source: jax.Array, move, kept: jax.Array, senders: jax.Array):
        """Sends the entries at ``source[..., b]``; joins the arrivals to the first ``kept``."""
        outgoing = codec.encode(take(entries, source), seed)
        incoming = codec.decode(move(outgoing.message), entries.size, entries.values.dtype)
        joined = _join(entries, kept, incoming, senders < me, capacity)
        if codec.exact:
            return _result(joined, entries, codec, axis)
        error = jnp.zeros_like(entries.values).at[source].set(outgoing.error, mode="drop")
        unsent = (source < entries.capacity) & ~outgoing.sent
        return joined, error, jnp.sum(unsent, dtype=jnp.int32)

    def to_neighbour():
        flow = ring_flow(counts, capacity)
        kept, passed = counts[me] - flow[me], flow[me]
        step = jnp.arange(plan.neighbour_slots, dtype=jnp.int32)
        source = jnp.where(step < passed, kept + step, entries.capacity)
        pairs = [(source, (source + 1) % workers) for source in range(workers)]
        left = (me - 1)[None] % workers
        move = lambda message: transport.ppermute(message, axis, pairs)  # noqa: E731
        return send(source[None], move, kept, left)

    everyone = jnp.arange(workers, dtype=jnp.int32)

    def exchange(message):
        return transport.all_to_all(message, axis)

    def to_room():
        block = plan.spread_slots
        surplus = jnp.arange(min(entries.capacity, workers * block), dtype=jnp.int32)
        worker, slot = _spread.deal(counts, me, capacity, surplus)
        target = jnp.where(surplus < counts[me] - capacity, worker * block + slot, -1)
        # The entry for each slot of the blocks, by scattering the entries' numbers.
        source = jnp.full((workers * block,), entries.capacity, jnp.int32)
        source = source.at[jnp.where(target < 0, workers * block, target)].set(
            capacity + surplus, mode="drop"
        )
        kept = jnp.minimum(counts[me], capacity)
        return send(source.reshape(workers, block), exchange, kept, everyone)

    def by_rank():
        share = even_share(counts)
        first = jnp.sum(jnp.where(everyone < me, counts, 0), dtype=jnp.int32)
        # Slot q of the block for worker d is for entry d * share + q of all.
        slots = jnp.arange(plan.rank_slots, dtype=jnp.int32)[None]
        source = everyone[:, None] * share + slots - first
        mine = (slots < share) & (source >= 0) & (source < counts[me])
        source = jnp.where(mine, source, entries.capacity)
        return send(source, exchange, jnp.zeros((), jnp.int32), everyone)

    def moved():
        if workers == 1:
            return stay()
        if mode == "always":
            return by_rank()
        if mode == "paper":
            return lax.cond(branch == 3, by_rank, stay)
        # With slots for all k nothing can be uneven.
        if capacity >= entries.capacity:
            return stay()
        if mode == "never":
            return what_fits()
        return lax.switch(branch, (stay, to_neighbour, to_room, by_rank))

    joined, error, unsent = moved()
    of_branches = words_of_branches(exchanges, counts, me, plan, unsent)
    words = jax.tree.map(lambda of_branch: of_branch[branch], of_branches)
    return Balanced(joined, error, unsent, words)


def even_share(counts: jax.Array) -> jax.Array:
    """How many entries each worker gets if all entries are shared evenly, ``i32[]``."""
    workers = counts.shape[0]
    return (jnp.sum(counts, dtype=jnp.int32) + workers - 1) // workers


def words_of_branches(
    exchanges: Sequence[Collective | None],
    counts: jax.Array,
    me: jax.Array,
    plan: Plan,
    unsent: jax.Array,
) -> _messages.Words:
    """The words that each branch moves, ``f32[4]``."""
    workers, mine, block = plan.workers, counts[me], even_share(counts)
    before = jnp.arange(workers, dtype=jnp.int32) < me
    first = jnp.sum(jnp.where(before, counts, 0), dtype=jnp.int32)
    # Entries whose rank is in this worker's own block stay.
    staying = jnp.minimum(first + mine, (me + 1) * block) - jnp.maximum(first, me * block)
    by_rank = mine - jnp.maximum(staying, 0)
    flow = ring_flow(counts, plan.gather_slots)[me]
    surplus = jnp.maximum(mine - plan.gather_slots, 0)
    sent = (jnp.zeros_like(mine), flow, surplus, by_rank)
    if exchanges[0] is not None:
        sent = (by_rank,) * len(exchanges)
    words = [
        words_of(exchange, entries - unsent, workers) if exchange else _messages.no_words()
        for exchange, entries in zip(exchanges, sent, strict=True)
    ]
    return jax.tree.map(lambda *of_branch: jnp.stack(of_branch), *words)


def _join(
    own: PaddedCOO, kept: jax.Array, incoming: PaddedCOO, is_before: jax.Array, capacity: int
) -> PaddedCOO:
    """The first ``kept`` slots of ``own`` and the entries that arrived, in ``capacity`` slots.

    Rows of ``incoming`` for which ``is_before`` holds go to the front, the others to the end:
    a worker's entries belong to its region, and regions ascend with the workers.
    """
    indices = incoming.indices.reshape(-1)
    arrived = incoming.indices < own.size
    in_front = jnp.sum(arrived & is_before[:, None], dtype=jnp.int32)
    order = jnp.cumsum(arrived.reshape(-1), dtype=jnp.int32) - 1
    order = jnp.where(order < in_front, order, order + kept)
    target = jnp.where(arrived.reshape(-1), order, capacity)
    slot = jnp.arange(capacity, dtype=jnp.int32) - in_front
    joined = take(own, jnp.where((slot >= 0) & (slot < kept), slot, own.capacity))
    return PaddedCOO(
        joined.values.at[target].set(incoming.values.reshape(-1), mode="drop"),
        joined.indices.at[target].set(indices, mode="drop"),
        own.size,
    )


def _result(
    moved: PaddedCOO, entries: PaddedCOO, codec: Codec, axis: AxisName
) -> tuple[PaddedCOO, jax.Array | None, jax.Array]:
    """The result of a branch without an error, typed like the result of any other branch."""
    unsent = jnp.zeros((), jnp.int32)
    if codec.exact:
        return moved, None, unsent
    error, unsent = _varying.to_varying((jnp.zeros_like(entries.values), unsent), axis)
    return moved, error, unsent
