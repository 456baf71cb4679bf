"""The part of its accumulator that a worker keeps after a sparse exchange."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import PaddedCOO, Undelivered


class Kept(NamedTuple):
    """The parts that turn an accumulator, or this worker's shard of it, into the residual.

    Attributes:
      sent: the selection of this worker, as a PaddedCOO.
      undelivered: the undelivered part of the selection, and of entries of other workers.
      rounding: the part of the total that the leaves cannot represent or that exceeds the limit,
        from any worker: a PaddedCOO, or ``f32[m]`` if the total is dense; ``()`` if every leaf is
        float32 and there is no limit.
    """

    sent: PaddedCOO
    undelivered: Undelivered
    rounding: Any


def joined(kept: Kept) -> Kept:
    """``kept`` with remainder and rounding in one PaddedCOO, if both have the same indices.

    This saves a scatter for exchanges with full sums (``SparseAllreduce.full_sums``).
    """
    instead, rounding = kept.undelivered.rest_at_total, kept.rounding
    if instead is None or not isinstance(rounding, PaddedCOO):
        return kept
    if instead.indices is not rounding.indices:
        return kept
    values = instead.values + rounding.values.astype(instead.values.dtype)
    both = PaddedCOO(values, instead.indices, instead.size)
    return kept._replace(undelivered=kept.undelivered._replace(rest_at_total=both), rounding=())


def with_rounding(residual: jax.Array, rounding: Any) -> jax.Array:
    """The residual ``f32[1, m]`` plus :attr:`Kept.rounding`."""
    if isinstance(rounding, PaddedCOO):
        return residual.at[0, rounding.indices].add(rounding.values, mode="drop")
    return residual if isinstance(rounding, tuple) else residual + rounding[None]


def delivered_of(kept: Kept, residual: jax.Array) -> jax.Array:
    """Whether each sent entry was delivered, at least in part: its kept value has changed."""
    sent, left = kept.sent, kept.undelivered.slots
    if kept.undelivered.others.capacity or kept.undelivered.rest_at_total is not None:
        # The kept value of an entry may be in several parts.
        left = residual.at[0, sent.indices].get(mode="fill", fill_value=0)
    return (left != sent.values) & (sent.indices < sent.size)


def at(vector: jax.Array, entries: PaddedCOO) -> jax.Array:
    """The values of ``vector f32[1, m]`` at the indices of ``entries``, 0 in empty slots."""
    return vector.at[0, entries.indices].get(mode="fill", fill_value=0)


def later(kept: Kept, before: jax.Array, replaced: Any, acc: jax.Array) -> Kept:
    """``kept`` for a later accumulator, so that increments after the exchange stay.

    Args:
      kept: from the exchange.
      before: ``f32[c]``, the value of this worker in each slot that it sent.
      replaced: ``f32[K]``, its values at the indices of the remainder; ``()`` without one.
      acc: ``f32[1, m]``, the accumulator now.
    """
    undelivered, now = kept.undelivered, at(acc, kept.sent)
    # An undelivered entry keeps its present value, to the bit.
    slots = jnp.where(undelivered.slots == before, now, undelivered.slots + (now - before))
    remainder = undelivered.rest_at_total
    if remainder is not None:
        since = at(acc, remainder) - replaced
        remainder = PaddedCOO(remainder.values + since, remainder.indices, remainder.size)
    return kept._replace(
        sent=PaddedCOO(now, kept.sent.indices, kept.sent.size),
        undelivered=undelivered._replace(slots=slots, rest_at_total=remainder),
    )
