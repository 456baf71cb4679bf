"""What a worker keeps of its accumulator after a sparse exchange."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import PaddedCOO, Undelivered


class Kept(NamedTuple):
    """What makes the residual of the accumulator, of this worker's shard where there are shards.

    Attributes:
      sent: the selection of this worker, as a PaddedCOO.
      undelivered: what this worker keeps of it, and besides.
      rounding: what it keeps of the total that the leaves can't hold, or that is beyond the limit,
        whoever sent it: a PaddedCOO, or ``f32[m]`` where the total is dense; ``()`` where every
        leaf is float32 and there is no limit.
    """

    sent: PaddedCOO
    undelivered: Undelivered
    rounding: Any


def joined(kept: Kept) -> Kept:
    """``kept`` with one PaddedCOO for what is kept of the total, where both have the same indices.

    One scatter less, where a total is complete.
    """
    instead, rounding = kept.undelivered.remainder, kept.rounding
    if instead is None or not isinstance(rounding, PaddedCOO):
        return kept
    if instead.indices is not rounding.indices:
        return kept
    values = instead.values + rounding.values.astype(instead.values.dtype)
    both = PaddedCOO(values, instead.indices, instead.size)
    return kept._replace(undelivered=kept.undelivered._replace(remainder=both), rounding=())


def with_rounding(residual: jax.Array, rounding: Any) -> jax.Array:
    """The residual ``f32[1, m]`` and :attr:`Kept.rounding`."""
    if isinstance(rounding, PaddedCOO):
        return residual.at[0, rounding.indices].add(rounding.values, mode="drop")
    return residual if isinstance(rounding, tuple) else residual + rounding[None]


def delivered_of(kept: Kept, residual: jax.Array) -> jax.Array:
    """Whether anything of each sent entry was delivered: less of it, or more, is kept."""
    sent, left = kept.sent, kept.undelivered.slots
    if kept.undelivered.others.capacity or kept.undelivered.remainder is not None:
        # What is kept of an entry may be in several parts.
        left = residual.at[0, sent.indices].get(mode="fill", fill_value=0)
    return (left != sent.values) & (sent.indices < sent.size)


def at(vector: jax.Array, entries: PaddedCOO) -> jax.Array:
    """What ``vector f32[1, m]`` has at the indices of ``entries``, 0 in empty slots."""
    return vector.at[0, entries.indices].get(mode="fill", fill_value=0)


def later(kept: Kept, before: jax.Array, replaced: Any, acc: jax.Array) -> Kept:
    """The same, where the accumulator has moved on since: what came since then stays, too.

    Args:
      kept: of the exchange.
      before: ``f32[c]``, what this worker had in each slot of what it sent.
      replaced: ``f32[K]``, what it had at the indices of the remainder; ``()`` without one.
      acc: ``f32[1, m]``, what it has now.
    """
    undelivered, now = kept.undelivered, at(acc, kept.sent)
    # Of an entry that was not delivered all that there is now, to the bit.
    slots = jnp.where(undelivered.slots == before, now, undelivered.slots + (now - before))
    remainder = undelivered.remainder
    if remainder is not None:
        since = at(acc, remainder) - replaced
        remainder = PaddedCOO(remainder.values + since, remainder.indices, remainder.size)
    return kept._replace(
        sent=PaddedCOO(now, kept.sent.indices, kept.sent.size),
        undelivered=undelivered._replace(slots=slots, remainder=remainder),
    )
