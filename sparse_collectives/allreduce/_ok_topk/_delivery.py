"""Selects the sums that each worker delivers of its own: lines 9 to 13 of Algorithm 1.

There are two ways with the same result. At once, if windows show the global threshold and all
delivered entries fit their slots of the allgather: one exchange. Otherwise by rounds: the threshold
digit by digit, the counts, and the balancing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _data, _varying, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _compaction, _kth_magnitude
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._ok_topk import _balance, _global_selection
from sparse_collectives.allreduce._ok_topk._plan import Collectives, Plan
from sparse_collectives.allreduce._parts import _messages


class Step(NamedTuple):
    """The options of all steps, and the values of one.

    Attributes:
      axis: the workers.
      plan: the slots.
      exchanges: the messages.
      k: the rank of the threshold among all sums.
      most: the largest number of entries of the result.
      period: steps between two exact evaluations of the threshold.
      balance: the mode of the balancing.
      paper: whether it is Algorithm 1 as published.
      codec: encoding of the entries that are balanced.
      placed: moves a worker's entries to their places in the whole vector.
      count: ``i32[]``, steps taken.
      threshold: ``f32[]``, the threshold that this step may reuse.
      select_turn: ``u32[]``, decides which entries wait if more reach the threshold than are
        delivered.
      balance_turn: ``u32[]``, decides the same if more are delivered than fit.
      seed: ``u32[]``, the seed of the codec.
    """

    axis: AxisName
    plan: Plan
    exchanges: Collectives
    k: int
    most: int
    period: int
    balance: str
    paper: bool
    codec: Codec
    placed: Callable[[PaddedCOO], PaddedCOO]
    count: jax.Array
    threshold: jax.Array
    select_turn: jax.Array
    balance_turn: jax.Array
    seed: jax.Array


class Delivery(NamedTuple):
    """The entries that this worker delivers, and numbers that all workers have.

    Attributes:
      entries: entries of this worker after the balancing, ``plan.gather_slots`` slots.
      held: ``i32[]``, the number of these.
      delivered: ``i32[]``, the number of entries of all workers.
      threshold_bits: ``i32[]``, the bits of the global threshold.
      passed: ``i32[]``, entries of all workers that reach it.
      overflow: ``f32[]``, the overflow of all workers.
      unsent: ``i32[]``, entries that this worker could not pass on.
      moved: its entries before the balancing, and the part of each that its new holder misses;
        None if nothing can be missed.
      words: the words that were moved.
    """

    entries: PaddedCOO
    held: jax.Array
    delivered: jax.Array
    threshold_bits: jax.Array
    passed: jax.Array
    overflow: jax.Array
    unsent: jax.Array
    moved: tuple[PaddedCOO, jax.Array] | None
    words: _messages.Words


def deliver(entries: PaddedCOO, overflow: jax.Array, step: Step) -> Delivery:
    """Selects from the sums ``entries`` that this worker owns; all workers take the same way.

    Args:
      entries: ascending, at the places of this worker's region.
      overflow: ``i32[]``, the overflow of this worker.
      step: the options and the values of this step.
    """
    bits = _global_selection.deliverable_bits(entries)
    plan, axis = step.plan, step.axis

    def by_rounds() -> Delivery:
        return _by_rounds(entries, bits, overflow, step)

    if not plan.window:
        return by_rounds()
    with jax.named_scope("ok_topk/windows"):
        seen = _global_selection.look(bits, plan, overflow, axis)
    fits = seen.holds & (jnp.max(seen.quota) <= plan.gather_slots)
    # The rounds have a ppermute, in which all devices of a mesh meet.
    fits = transport.holds_on_mesh(fits[None], axis)[0]
    assert step.exchanges.window is not None
    words = _messages.words_in_full(step.exchanges.window.received(plan.workers))
    with jax.named_scope("ok_topk/delivery"):
        found = _cond(fits, lambda: _at_once(entries, bits, seen, step), by_rounds)
    return found._replace(words=_messages.words_in_all(words, found.words))


def _at_once(
    entries: PaddedCOO, bits: jax.Array, seen: _global_selection.Seen, step: Step
) -> Delivery:
    """Delivers the entries that the windows show."""
    plan = step.plan
    mine = seen.quota[transport.axis_index(step.axis)]
    slot, held = _kth_magnitude.slots_from(bits, seen.threshold_bits, mine, none=plan.gather_slots)
    kept = step.placed(_compaction.to_slots(entries, slot, capacity=plan.gather_slots))
    moved = None
    if not step.codec.exact:
        slots = min(step.most, entries.capacity)
        none = _data.empty(kept.size, slots, entries.values.dtype)
        moved = (none, none.values)
    return Delivery(
        entries=kept,
        held=held,
        delivered=jnp.sum(seen.quota, dtype=jnp.int32),
        threshold_bits=seen.threshold_bits,
        passed=jnp.sum(seen.quota, dtype=jnp.int32),
        overflow=seen.overflow,
        unsent=jnp.zeros((), jnp.int32),
        moved=moved,
        words=_messages.no_words(),
    )


def _by_rounds(entries: PaddedCOO, bits: jax.Array, overflow: jax.Array, step: Step) -> Delivery:
    """The threshold, the counts, and the balancing, one after the other."""
    axis, plan, exchanges = step.axis, step.plan, step.exchanges
    with jax.named_scope(f"ok_topk/global_threshold.every{step.period}"):
        threshold_bits, threshold_words = _global_selection.current_threshold(
            bits,
            step.k,
            step.threshold,
            step.period,
            step.count,
            exchanges.threshold,
            axis,
            exchanges.published,
        )
    with jax.named_scope("ok_topk/global_selection"):
        selection = _global_selection.select_global(
            bits, threshold_bits, step.most, overflow, axis, step.select_turn
        )
        counts_words = _messages.words_in_full(exchanges.counts.received(plan.workers))
    mine, _ = _compaction.compact_mask(
        entries, selection.mask, capacity=min(step.most, entries.capacity)
    )
    mine = step.placed(mine)
    # Line 13: spread them evenly.
    branch = _balance.choose_branch(selection.quota, plan, axis, paper=step.paper)
    with jax.named_scope("ok_topk/balance"):
        balanced = _balance.balance(
            mine,
            selection.quota,
            branch,
            plan,
            axis=axis,
            codec=step.codec,
            seed=step.seed,
            exchanges=exchanges.balance,
            mode=step.balance,
            turn=step.balance_turn,
        )
    # With 'never', entries that do not fit stay.
    most = plan.gather_slots if step.balance == "never" else step.most
    stays = jnp.minimum(selection.quota, most)
    return Delivery(
        entries=balanced.entries,
        held=balanced.entries.count(),
        delivered=jnp.sum(stays, dtype=jnp.int32),
        threshold_bits=threshold_bits,
        passed=selection.passed,
        overflow=selection.overflow,
        unsent=balanced.unsent,
        moved=None if balanced.error is None else (mine, balanced.error),
        words=_messages.words_in_all(threshold_words, counts_words, balanced.words),
    )


def _cond(predicate: jax.Array, *branches: Callable[[], Delivery]) -> Delivery:
    """``lax.cond`` of branches whose results may be typed as varying over different axes."""
    # Traced once, for its shapes and as a branch.
    traced = [jax.jit(branch, inline=True) for branch in branches]
    shapes = [jax.eval_shape(branch) for branch in traced]

    def typed(branch: Callable[[], Delivery]) -> Callable[[], Delivery]:
        return lambda: jax.tree.map(_varying.varying_like, branch(), *shapes)

    return lax.cond(predicate, *map(typed, traced))
