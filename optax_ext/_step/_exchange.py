"""From an accumulator to the mean that every worker applies: sparse, or dense to begin with."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._step import _layout, _narrow, _nonfinite, _sparse_state
from optax_ext._step._sparse_state import StepInfo
from sparse_collectives import PaddedCOO, Selector, SparseAllreduce, Undelivered, extend, transport
from sparse_collectives.extend import AxisName


class Exchanged(NamedTuple):
    """The result of an exchange, of this worker's shard where there are shards.

    Attributes:
      mean: ``f32[m]``, the total over P, within the limit, as the dtypes of the leaves can hold it.
      sent: the selection of this worker, as a PaddedCOO.
      undelivered: what this worker keeps of it, and besides.
      rounding: what it keeps of the total that the leaves can't hold, or that is beyond the limit,
        whoever sent it: a PaddedCOO, or ``f32[m]`` where the total is dense; ``()`` where every
        leaf is float32 and there is no limit.
      selector: the selector's state.
      allreduce: the allreduce's state.
      dropped: ``i32[]``, entries that were left out.
      withheld: ``i32[]``, entries that could not be delivered, or not wholly.
      info: without leading axes.
      proceeds: ``bool[]``, what the workers agreed on meanwhile; None: nothing.
    """

    mean: jax.Array
    sent: PaddedCOO
    undelivered: Undelivered
    rounding: Any
    selector: Any
    allreduce: Any
    dropped: jax.Array
    withheld: jax.Array
    info: StepInfo
    proceeds: jax.Array | None = None


class Parts(NamedTuple):
    """What a sparse exchange is made with.

    Attributes:
      selector: from ``acc f[m]`` to what is sent.
      allreduce: from that to the total.
      axis: of all workers.
      nonfinite: the policy.
      limit: ``f32[]``, beyond which three quarters of an entry of a mean are kept; None: there
        is no limit.
    """

    selector: Selector
    allreduce: SparseAllreduce
    axis: AxisName
    nonfinite: str
    limit: jax.Array | None = None

    @property
    def nodes_axis(self) -> AxisName:
        """The axis over which totals are the same: all of it but the shards'."""
        return extend.outer_axis(self.axis, self.allreduce.shard_axis)

    @property
    def shards(self) -> int:
        """Into how many shards the buffer is dealt out."""
        return transport.axis_size(self.allreduce.shard_axis)

    def over_shards(self, counts: jax.Array) -> tuple[jax.Array, float]:
        """The sum over the shards of counts of one, and the words that it takes."""
        axis = self.allreduce.shard_axis
        if not axis:
            return counts, 0.0
        return transport.psum(counts, axis), extend.words_of_all_reduce(counts.size, self.shards)


def sparse(
    acc: jax.Array,
    selector_state: Any,
    allreduce_state: Any,
    *,
    parts: Parts,
    layout: _layout.TreeLayout,
    proceeds: jax.Array | None,
    bad: jax.Array | None = None,
) -> Exchanged:
    """Selects from ``acc f[m]``, and reduces.

    With ``bad``, ``i32[]``, nothing is sent, delivered or kept if any worker has a 1 there.
    """
    allreduce, axis = parts.allreduce, parts.axis
    shown = allreduce.show(acc, allreduce_state, axis=axis)
    coo, selector_state, selection = parts.selector.select(shown, selector_state)
    coo = allreduce.place(coo, acc.shape[0], allreduce_state, axis=axis)
    if proceeds is not None:
        # A skipped step goes through the motions with nothing to send: a rare
        # cost, where a branch around the step would copy the residual at each.
        coo = _only_if(proceeds, coo)
    held = {"acc": acc} if allreduce.complete else {}
    if bad is not None:
        held["told"] = bad
    total, undelivered, allreduce_state, reduction = allreduce.reduce(
        coo, allreduce_state, axis=axis, **held
    )
    agreed = None
    if bad is not None:
        agreed = reduction.told == 0
        coo, total, undelivered = jax.tree.map(
            lambda entries: _only_if(agreed, entries),
            (coo, total, undelivered),
            is_leaf=lambda x: isinstance(x, PaddedCOO),
        )
    total, undelivered, withheld = _nonfinite.withhold(parts.nonfinite, total, coo, undelivered)
    mean, rounding, saturated = _mean(total, parts, layout)
    withheld, words = parts.over_shards(withheld + saturated)
    return Exchanged(
        mean=mean,
        sent=coo,
        undelivered=undelivered,
        rounding=rounding,
        selector=selector_state,
        allreduce=allreduce_state,
        dropped=jnp.zeros((), jnp.int32),
        withheld=withheld,
        info=_sparse_state.no_info()._replace(
            selected=selection.selected,
            delivered=reduction.delivered,
            overflow=selection.overflow + reduction.overflow,
            local_threshold=selection.threshold,
            global_threshold=reduction.threshold,
            words=reduction.words + jnp.float32(words),
            useful=reduction.useful + jnp.float32(words),
        ),
        proceeds=agreed,
    )


def _only_if(condition: jax.Array, entries: Any) -> Any:
    """``entries``, or nothing; values without indices stay as they are."""
    if not isinstance(entries, PaddedCOO):
        return entries
    return PaddedCOO(
        jnp.where(condition, entries.values, jnp.zeros_like(entries.values)),
        jnp.where(condition, entries.indices, entries.size),
        entries.size,
    )


def dense(increment: jax.Array, like: Exchanged, *, parts: Parts) -> Exchanged:
    """The dense mean of ``increment f32[m]``, with nothing selected.

    Args:
      increment: of this worker, or of its shard.
      like: the shapes of :func:`sparse`'s result, with states that are passed on.
      parts: the axis, and how the buffer is dealt out.
    """
    workers, size, inside = transport.axis_size(parts.axis), increment.shape[0], parts.shards
    total = transport.psum(increment, parts.nodes_axis)
    mean, dropped = _nonfinite.dense_mean(parts.nonfinite, total, workers)
    counts = jnp.stack([jnp.sum(total != 0, dtype=jnp.int32), dropped])
    counts, words = parts.over_shards(counts)
    words += extend.words_of_all_reduce(size, workers // inside)
    words += extend.words_of_reduce_scatter(size * inside, inside) + extend.words_of_all_gather(
        size, inside
    )
    rounding = like.rounding
    kept = like.undelivered

    def none(entries):
        return extend.empty(size, entries.capacity, jnp.float32)

    if isinstance(rounding, PaddedCOO):
        rounding = none(rounding)
    else:
        rounding = jax.tree.map(jnp.zeros_like, rounding)
    return like._replace(
        mean=mean,
        sent=extend.empty(size, like.sent.capacity, like.sent.values.dtype),
        undelivered=Undelivered(
            jnp.zeros_like(kept.slots),
            none(kept.others),
            None if kept.instead is None else none(kept.instead),
        ),
        rounding=rounding,
        dropped=counts[1],
        withheld=jnp.zeros((), jnp.int32),
        info=_sparse_state.no_info()._replace(
            selected=jnp.sum(increment != 0, dtype=jnp.int32),
            delivered=counts[0],
            words=jnp.float32(words),
            useful=jnp.float32(words),
        ),
    )


def dense_or_sparse(
    is_dense: jax.Array,
    dense_branch: Any,
    sparse_branch: Any,
    axis: AxisName,
    part_axes: tuple[Hashable, ...],
):
    """One of the two, typed alike; all workers have the same ``is_dense``."""

    def typed(branch):
        result = branch()
        per_worker = (result.sent, result.undelivered, result.rounding)
        sent, undelivered, rounding = extend.to_varying(per_worker, axis)
        info = _sparse_state.per_worker(result.info, lambda x: extend.to_varying(x, axis))
        result = result._replace(sent=sent, undelivered=undelivered, rounding=rounding, info=info)
        return extend.to_varying(result, part_axes)

    return lax.cond(is_dense, lambda: typed(dense_branch), lambda: typed(sparse_branch))


def joined(result: Exchanged) -> Exchanged:
    """``result`` with what is kept of the total at hand, where both are of the same indices.

    One scatter less, where a total is complete.
    """
    instead, rounding = result.undelivered.instead, result.rounding
    if instead is None or not isinstance(rounding, PaddedCOO):
        return result
    if instead.indices is not rounding.indices:
        return result
    values = instead.values + rounding.values.astype(instead.values.dtype)
    both = PaddedCOO(values, instead.indices, instead.size)
    undelivered = result.undelivered._replace(instead=both)
    return result._replace(undelivered=undelivered, rounding=())


def with_rounding(residual: jax.Array, rounding: Any) -> jax.Array:
    """The residual ``f32[1, m]`` and :attr:`Exchanged.rounding`."""
    if isinstance(rounding, PaddedCOO):
        return residual.at[0, rounding.indices].add(rounding.values, mode="drop")
    return residual if isinstance(rounding, tuple) else residual + rounding[None]


def delivered_of(result: Exchanged, residual: jax.Array) -> jax.Array:
    """Whether anything of each sent entry was delivered: less of it, or more, is kept."""
    sent, kept = result.sent, result.undelivered.slots
    if result.undelivered.others.capacity or result.undelivered.instead is not None:
        # What is kept of an entry may be in several parts.
        kept = residual.at[0, sent.indices].get(mode="fill", fill_value=0)
    return (kept != sent.values) & (sent.indices < sent.size)


def _mean(
    total: PaddedCOO | jax.Array, parts: Parts, layout: _layout.TreeLayout
) -> tuple[jax.Array, Any, jax.Array]:
    """The total over P, ``f32[m]``, and what of it is not applied.

    There may be a limit, and a 16-bit leaf rounds its update, and may be too narrow for it. What
    that takes off is the same on every worker; each keeps it once for every worker whose update
    it is, so that over the workers the sum of the residuals has all of it.

    Returns:
      The mean; what this worker keeps, as :attr:`Exchanged.rounding`; ``i32[]``, entries that
      are too large for their leaves.
    """
    workers = transport.axis_size(parts.axis)
    narrows = _narrow.narrows(layout)
    saturates = parts.nonfinite != "propagate"
    saturated = jnp.zeros((), jnp.int32)
    whole = not narrows and parts.limit is None

    def applied(mean, index):
        """What of the mean is applied, what is not, and how many saturate."""
        held, count = _limited(mean, parts.limit), saturated
        if narrows:
            held, large = _narrow.held(held, index, layout, saturate=saturates)
            count = jnp.sum(large & saturates, dtype=jnp.int32)
        # What is not finite is in the update, by policy, and nothing of it can be kept.
        off = jnp.where(jnp.isfinite(held), mean - held, 0.0) * jnp.float32(parts.shards)
        return held, off, count

    def place(local):
        """Where an entry of this shard is in the whole buffer."""
        axis = parts.allreduce.shard_axis
        return local + transport.axis_index(axis) * size if axis else local

    if not isinstance(total, PaddedCOO):
        size = total.shape[0]
        mean = total.astype(jnp.float32) / workers
        if whole:
            return mean, (), saturated
        dealt_out = parts.allreduce.shard_axis
        return applied(mean, place(jnp.arange(size, dtype=jnp.int32)) if dealt_out else None)
    size = total.size
    values, rounding = total.values.astype(jnp.float32) / workers, ()
    if not whole:
        index = jnp.where(total.indices < size, place(total.indices), -1)
        values, off, saturated = applied(values, index)
        rounding = PaddedCOO(off, total.indices, size)
    return PaddedCOO(values, total.indices, size).to_dense(), rounding, saturated


def _limited(mean: jax.Array, limit: jax.Array | None) -> jax.Array:
    """``mean`` up to the limit, and a quarter of what is beyond it.

    A hard limit would let updates of one sign pile up without bound wherever more of them arrive
    between two deliveries of an entry than the limit lets through. With a quarter of what is
    beyond, no more waits after a delivery than three times the most that arrived between two.
    """
    if limit is None:
        return mean
    beyond = mean - jnp.clip(mean, -limit, limit)
    return jnp.where(jnp.isfinite(mean), mean - 0.75 * beyond, mean)
