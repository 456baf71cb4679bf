"""A selector and a sparse allreduce as the exchange of error feedback."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback import _applied, _kept, _layout, _phases, _roles, _sparse_state
from optax_ext._error_feedback._contract import Accumulated, Options, Reduced
from optax_ext._error_feedback._kept import Kept
from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from sparse_collectives import (
    AxisName,
    Layout,
    PaddedCOO,
    Selector,
    SparseAllreduce,
    Undelivered,
    _axes,
    _varying,
    extend,
    transport,
)

# The mean of this worker's shard, the state, and the parts of the residual.
Exchanged = tuple[jax.Array, SparseAllreduceState, Kept]

# The fields that an exchange changes.
_CHANGED = _roles.names(SparseAllreduceState, _roles.EXCHANGE)


@dataclasses.dataclass(frozen=True, eq=False)
class SparseExchange:
    """The :class:`Exchange` of :func:`sparse_allreduce`, which documents the fields."""

    selector: Selector
    allreduce: SparseAllreduce
    correction: MomentumCorrection | None
    options: Options

    def may_keep_of_others(self, layout: _layout.TreeLayout) -> bool:
        """Partial sums, by the allreduce, or the part of a mean that is cut off, on all workers."""
        partial_sums = self.allreduce.may_keep_partial_sums
        return partial_sums or _applied.rounds(layout, self.options.limit)

    @property
    def shard_axis(self) -> AxisName:
        """As in the allreduce."""
        return self.allreduce.shard_axis

    def dense(self, params: Any, labels: tuple[bool, ...] | None) -> tuple[bool, ...] | None:
        """The leaves that the user has labeled dense."""
        del params
        return labels

    def part_size(self, size: int) -> int:
        """The number of entries of the buffer that one worker holds."""
        inside = transport.axis_size(self.allreduce.shard_axis)
        return math.ceil(size / inside)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """This worker's shard, summed over the workers of its node, if there are shards."""
        return self.allreduce.scatter(gradient)

    def init(self, layout: _layout.TreeLayout, workers: int) -> tuple[Any, Any]:
        """The states of the selector and of the allreduce."""
        size = self.part_size(layout.size)
        if not size:
            return (), ()
        layers = Layout(layout.sparse_shapes)
        shared = self.allreduce.init(layers, workers)
        shown = self._shown_size(size, shared)
        # A part cuts through layers, so the selector sees it as one layer.
        selector = self.selector.init(layers if shown == layout.size else shown)
        if self.allreduce.shard_axis:
            shared = _varying.to_varying(shared, self.allreduce.shard_axis)
        return selector, shared

    def reduce(self, step: Accumulated) -> Reduced:
        """One step."""
        phase = step.state.settings.phase
        if not step.layout.size:
            reduced = _applied.nothing_exchanged(step, self.options.axis)
        elif phase == _phases.LOCAL:
            reduced = self._between(step)
        elif phase == _phases.EXCHANGE:
            mean, state = self._between(step)
            reduced = mean, state._replace(allreduce=self._arriving(step))
        else:
            reduced = self._keep(step, *self._exchange(step))
        return _applied.with_dense_leaves(reduced, step, None, self.options)

    def _exchange(self, step: Accumulated) -> Exchanged:
        """The exchange of this step, if it has one."""
        arrived = step.state.allreduce
        if isinstance(arrived, _phases.Arrived):
            return _late(step, arrived)
        if step.is_exchange is None and step.is_dense is None:
            return self._sparse(step)
        mean, changed, kept = self._one_of(step)
        return mean, step.state._replace(**changed), kept

    def _one_of(self, step: Accumulated) -> Any:
        """The mean, the changed fields of the state, and the kept parts, of one of these branches.

        A sparse exchange of the accumulator, a dense one if the step is dense, or none if none is
        is_exchange: the same for all workers and for all groups of a mesh.
        """
        # Traced once, as a branch and for the shapes of the other branches.
        sparse = jax.jit(lambda: self._typed(step, *self._sparse(step)), inline=True)

        def other(way: Callable[[Accumulated], tuple[jax.Array, SparseAllreduceState]]) -> Any:
            mean, state = way(step)
            return self._typed(step, mean, state, _nothing_sent(step, jax.eval_shape(sparse)[2]))

        def exchanged() -> Any:
            if step.is_dense is None:
                return sparse()
            # Results of a branch are copied, so branches return only the fields that change.
            return lax.cond(step.is_dense, lambda: other(self._dense), sparse)

        if step.is_exchange is None:
            return exchanged()
        # The scope gives the traffic meter the number of steps from one exchange to the next.
        with jax.named_scope(f"round.every{self.options.every}"):
            return lax.cond(step.is_exchange, exchanged, lambda: other(_waiting))

    def _typed(
        self, step: Accumulated, mean: jax.Array, state: SparseAllreduceState, kept: Kept
    ) -> Any:
        """The mean, the changed fields of the state and the kept parts, typed alike in branches."""
        mean = _varying.to_varying(mean, self.shard_axis)
        kept = _varying.to_varying(kept, self.options.axis)
        info = _sparse_state.per_worker(
            state.info, lambda x: _varying.to_varying(x, self.options.axis)
        )
        changed = {name: getattr(state, name) for name in _CHANGED} | {"info": info}
        return _varying.to_varying((mean, changed, kept), step.layout.device_axes)

    def _between(self, step: Accumulated) -> tuple[jax.Array, SparseAllreduceState]:
        """A step that is traced without an exchange."""
        mean = jnp.zeros((step.layout.size,), jnp.float32)
        state = _without_news(step.state)
        return mean, state._replace(residual=step.acc, velocity=step.pending.velocity)

    def _arriving(self, step: Accumulated) -> _phases.Arrived:
        """The exchange of the residuals, for a later step."""
        mean, changed, kept = self._typed(step, *self._sparse(step))
        kept, remainder = _kept.joined(kept), kept.undelivered.rest_at_total
        return _phases.Arrived(
            mean=mean,
            changed=changed,
            kept=kept,
            before=_kept.at(step.acc, kept.sent),
            replaced=() if remainder is None else _kept.at(step.acc, remainder),
        )

    def _sparse(self, step: Accumulated) -> Exchanged:
        """Selects from the accumulator and reduces the selections."""
        allreduce, axis, options = self.allreduce, self.options.axis, self.options
        selector_state = _sparse_state.without_lead(step.state.selector)
        allreduce_state = _sparse_state.without_lead(step.state.allreduce)
        acc = step.acc[0]
        shown = allreduce.local_view(acc, allreduce_state, axis=axis)
        coo, selector_state, selection = self.selector.select(shown, selector_state)
        coo = allreduce.to_global(coo, acc.shape[0], allreduce_state, axis=axis)
        if step.all_finite is not None:
            # A skipped step runs the exchange with nothing to send. That cost is rare; a branch
            # around the exchange would copy the residual at every step.
            coo = extend.only_where(step.all_finite, coo)
        held = {"acc": acc} if allreduce.full_sums else {}
        total, undelivered, allreduce_state, reduction = allreduce.reduce(
            coo, allreduce_state, axis=axis, **held
        )
        total, undelivered, withheld = _applied.withhold(options.nonfinite, total, coo, undelivered)
        mean, rounding, saturated = _applied.mean_of(
            total,
            step.layout,
            axis=axis,
            shard_axis=allreduce.shard_axis,
            limit=_applied.limit_at(options.limit, step.state.count),
            saturates=options.nonfinite != "propagate",
        )
        withheld, words = self._over_shards(withheld + saturated)
        state = step.state._replace(
            selector=_sparse_state.with_lead(selector_state),
            allreduce=_sparse_state.with_lead(allreduce_state),
            withheld=step.state.withheld + withheld,
            info=_sparse_state.no_info()._replace(
                selected=selection.selected,
                delivered=reduction.delivered,
                overflow=selection.overflow + reduction.overflow,
                local_threshold=selection.threshold,
                global_threshold=reduction.threshold,
                words=reduction.words + jnp.float32(words),
                useful=reduction.useful + jnp.float32(words),
            ),
        )
        return mean, state, Kept(coo, undelivered, rounding)

    def _dense(self, step: Accumulated) -> tuple[jax.Array, SparseAllreduceState]:
        """The dense mean of the increments, without a selection."""
        increment = step.pending.increment[0]
        axis, shard_axis = self.options.axis, self.allreduce.shard_axis
        workers, inside = transport.axis_size(axis), transport.axis_size(shard_axis)
        size = increment.shape[0]
        total = transport.psum(increment, _axes.outer_axis(axis, shard_axis))
        mean, dropped = _applied.dense_mean(self.options.nonfinite, total, workers)
        saturated = self._in_leaves(step, mean)[2]
        counts = jnp.stack([jnp.sum(total != 0, dtype=jnp.int32), dropped, saturated])
        counts, words = self._over_shards(counts)
        words += extend.words_of_all_reduce(size, workers // inside)
        words += extend.words_of_reduce_scatter(size * inside, inside) + extend.words_of_all_gather(
            size, inside
        )
        state = step.state._replace(
            dropped=step.state.dropped + counts[1],
            withheld=step.state.withheld + counts[2],
            info=_sparse_state.no_info()._replace(
                selected=jnp.sum(increment != 0, dtype=jnp.int32),
                delivered=counts[0],
                words=jnp.float32(words),
                useful=jnp.float32(words),
            ),
        )
        return mean, state

    def _in_leaves(self, step: Accumulated, mean: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        """The mean of a dense step, as :func:`._applied.in_leaves`."""
        saturates, shard_axis = self.options.nonfinite != "propagate", self.allreduce.shard_axis
        return _applied.in_leaves(mean, step.layout, shard_axis=shard_axis, saturates=saturates)

    def _over_shards(self, counts: jax.Array) -> tuple[jax.Array, float]:
        """The sum of a shard's counts over the shards, and its words."""
        axis = self.allreduce.shard_axis
        if not axis:
            return counts, 0.0
        words = extend.words_of_all_reduce(counts.size, transport.axis_size(axis))
        return transport.psum(counts, axis), words

    def _keep(
        self, step: Accumulated, mean: jax.Array, state: SparseAllreduceState, kept: Kept
    ) -> tuple[jax.Array, SparseAllreduceState]:
        """The mean of the whole buffer, and the state with the new residual."""
        kept = _kept.joined(kept)
        residual = kept.undelivered.residual(step.acc, kept.sent)
        arrived = _kept.delivered_of(kept, residual)
        velocity = step.pending.velocity
        if self.correction is not None:
            velocity = self.correction.mask(velocity, kept.sent.indices, arrived)
            whole = kept.undelivered.rest_at_total
            if whole is not None:
                # Full sums also took this worker's part of entries that others selected.
                everywhere = jnp.ones(whole.indices.shape, jnp.bool_)
                velocity = self.correction.mask(velocity, whole.indices, everywhere)
        residual = _kept.with_rounding(residual, kept.rounding)
        if step.is_dense is not None:
            # The kept parts have no slots for a dense step. The mean of a sparse one is held as is.
            mean, off, _ = self._in_leaves(step, mean)
            residual = _kept.with_rounding(residual, off)
        return self.allreduce.gather(mean, step.layout.size), state._replace(
            residual=residual,
            velocity=velocity,
            info=state.info._replace(arrived=jnp.sum(arrived, dtype=jnp.int32)),
        )

    def _shown_size(self, size: int, shared: Any) -> int:
        """How many of its ``size`` entries a worker selects from at one step."""

        def show(acc):
            return self.allreduce.local_view(acc, shared, axis=self.options.axis)

        return jax.eval_shape(show, jax.ShapeDtypeStruct((size,), jnp.float32)).shape[0]


def _waiting(step: Accumulated) -> tuple[jax.Array, SparseAllreduceState]:
    """A step without an exchange, as one branch of a compiled step."""
    return jnp.zeros(step.acc.shape[1:], jnp.float32), _without_news(step.state)


def _nothing_sent(step: Accumulated, like: Kept) -> Kept:
    """Empty kept parts in the shapes of a sparse exchange."""
    size, undelivered, rounding = step.acc.shape[1], like.undelivered, like.rounding

    def none(entries: PaddedCOO) -> PaddedCOO:
        return extend.empty(size, entries.capacity, jnp.float32)

    if isinstance(rounding, PaddedCOO):
        rounding = none(rounding)
    else:
        rounding = jax.tree.map(jnp.zeros_like, rounding)
    return Kept(
        sent=extend.empty(size, like.sent.capacity, like.sent.values.dtype),
        undelivered=Undelivered(
            jnp.zeros_like(undelivered.slots),
            none(undelivered.others),
            None if undelivered.rest_at_total is None else none(undelivered.rest_at_total),
        ),
        rounding=rounding,
    )


def _without_news(state: SparseAllreduceState) -> SparseAllreduceState:
    """The state after a step without an exchange; thresholds stay from the last exchange."""
    before = state.info
    info = _sparse_state.no_info()._replace(
        local_threshold=before.local_threshold[0], global_threshold=before.global_threshold
    )
    return state._replace(info=info)


def _late(step: Accumulated, arrived: _phases.Arrived) -> Exchanged:
    """The results of an exchange that began some steps ago."""
    kept = _kept.later(arrived.kept, arrived.before, arrived.replaced, step.acc)
    return arrived.mean, step.state._replace(**arrived.changed), kept
