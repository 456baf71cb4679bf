"""From an accumulator to the mean that every worker applies: sparse, or dense to begin with."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext._step import _density_schedule, _sparse_state
from optax_ext._step._sparse_state import StepInfo
from sparse_collectives import (
    PaddedCOO,
    Selector,
    SparseAllreduce,
    _compat,
    _volumes,
    padded_coo,
    transport,
)
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce import Hierarchical, _hierarchical


class Exchanged(NamedTuple):
    """The result of an exchange.

    Attributes:
      mean: ``f32[n]``, the total over P; of the shard with a hierarchical allreduce.
      sent: the selection of this worker, as a PaddedCOO.
      undelivered: what this worker keeps of it; an array where it answers slot by slot.
      selector: the selector's state.
      allreduce: the allreduce's state.
      clipped: ``i32[]``, 1 where the density schedule was out of range.
      info: without leading axes.
    """

    mean: jax.Array
    sent: PaddedCOO
    undelivered: PaddedCOO | jax.Array
    selector: Any
    allreduce: Any
    clipped: jax.Array
    info: StepInfo


def sparse(
    acc: jax.Array,
    selector_state: Any,
    allreduce_state: Any,
    *,
    selector: Selector,
    allreduce: SparseAllreduce | Hierarchical,
    axis: AxisName,
    proceeds: jax.Array | None,
    schedule: _density_schedule.DensitySchedule | None,
    count: jax.Array,
) -> Exchanged:
    """Selects from ``acc f32[n]``, sends the largest that the schedule allows, and reduces."""
    coo, selector_state, selection = selector.select(acc, selector_state)
    clipped = jnp.zeros((), jnp.int32)
    if schedule is not None:
        coo, threshold, clipped = _density_schedule.largest(coo, schedule, count)
        selection = selection._replace(
            selected=coo.count(), threshold=jnp.maximum(selection.threshold, threshold)
        )
    if proceeds is not None:
        # A skipped step goes through the motions with nothing to send: a rare
        # cost, where a branch around the step would copy the residual at each.
        coo = PaddedCOO(
            jnp.where(proceeds, coo.values, 0), jnp.where(proceeds, coo.indices, coo.size), coo.size
        )
    total, undelivered, allreduce_state, reduction = allreduce.reduce(
        coo, allreduce_state, axis=axis
    )
    return Exchanged(
        mean=_mean(total, transport.axis_size(axis)),
        sent=coo,
        undelivered=undelivered.values if undelivered.indices is coo.indices else undelivered,
        selector=selector_state,
        allreduce=allreduce_state,
        clipped=clipped,
        info=_sparse_state.no_info()._replace(
            selected=selection.selected,
            delivered=reduction.delivered,
            overflow=selection.overflow + reduction.overflow,
            local_threshold=selection.threshold,
            global_threshold=reduction.threshold,
            words=reduction.words,
            useful=reduction.useful,
        ),
    )


def dense(increment: jax.Array, like: Exchanged, *, axis: AxisName, hierarchy: Any) -> Exchanged:
    """The dense mean of ``increment f32[n]``, with nothing selected.

    Args:
      increment: of this worker, or of its shard.
      like: the shapes of :func:`sparse`'s result, with states that are passed on.
      axis: of all workers.
      hierarchy: the :class:`Hierarchical`, or None.
    """
    workers, size = transport.axis_size(axis), increment.shape[0]
    nodes_axis, inner_words, delivered_axis = axis, 0.0, None
    if hierarchy is not None:
        delivered_axis = hierarchy.inner_axis
        nodes_axis = _hierarchical.outer_axis(axis, delivered_axis)
        inside = transport.axis_size(delivered_axis)
        inner_words = _volumes.reduce_scatter(size * inside, inside) + _volumes.all_gather(
            size, inside
        )
        inner_words += _volumes.all_reduce(1, inside)
    total = transport.psum(increment, nodes_axis)
    delivered = jnp.sum(total != 0, dtype=jnp.int32)
    if delivered_axis is not None:
        delivered = transport.psum(delivered, delivered_axis)
    words = inner_words + _volumes.all_reduce(size, transport.axis_size(nodes_axis))
    nothing = padded_coo.empty(size, like.sent.capacity, like.sent.values.dtype)
    kept: Any = like.undelivered
    if isinstance(kept, PaddedCOO):
        kept = padded_coo.empty(size, kept.capacity, kept.values.dtype)
    else:
        kept = jnp.zeros(kept.shape, kept.dtype)
    return like._replace(
        mean=total / workers,
        sent=nothing,
        undelivered=kept,
        clipped=jnp.zeros((), jnp.int32),
        info=_sparse_state.no_info()._replace(
            selected=jnp.sum(increment != 0, dtype=jnp.int32),
            delivered=delivered,
            words=jnp.float32(words),
            useful=jnp.float32(words),
        ),
    )


def typed_per_worker(result: Exchanged, axis: AxisName) -> Exchanged:
    """Types what differs between the workers as varying, for branches to agree."""
    sent, undelivered = _compat.to_varying((result.sent, result.undelivered), axis)
    info = _sparse_state.per_worker(result.info, lambda x: _compat.to_varying(x, axis))
    return result._replace(sent=sent, undelivered=undelivered, info=info)


def keep_undelivered(
    acc: jax.Array, sent: PaddedCOO, undelivered: PaddedCOO | jax.Array
) -> jax.Array:
    """``acc - sent + undelivered`` for ``acc f[1, n]``, in place where it is donated."""
    if not isinstance(undelivered, PaddedCOO):
        # The allreduce answers slot by slot: one scatter says all.
        return acc.at[0, sent.indices].set(undelivered.astype(acc.dtype), mode="drop")
    kept = acc.at[0, sent.indices].set(0.0, mode="drop")
    return kept.at[0, undelivered.indices].add(undelivered.values.astype(acc.dtype), mode="drop")


def delivered_of(sent: PaddedCOO, residual: jax.Array) -> jax.Array:
    """Whether anything of each sent entry was delivered: less of it, or more, is kept."""
    kept = residual.at[0, sent.indices].get(mode="fill", fill_value=0.0)
    return (kept != sent.values) & (sent.indices < sent.size)


def _mean(total: PaddedCOO | jax.Array, workers: int) -> jax.Array:
    """The total over P as ``f32[n]``."""
    if not isinstance(total, PaddedCOO):
        return total.astype(jnp.float32) / workers
    values = total.values.astype(jnp.float32) / workers
    return PaddedCOO(values, total.indices, total.size).to_dense()
