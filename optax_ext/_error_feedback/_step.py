"""The state and the step of error feedback around an exchange, on one device."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback import (
    _buffers,
    _layout,
    _nonfinite,
    _options,
    _owner,
    _residual,
    _roles,
    _sparse_state,
    _trace_checks,
)
from optax_ext._error_feedback._contract import Accumulated, Exchange, Options
from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._nonfinite import Pending
from optax_ext._error_feedback._roles import Role, Rows
from optax_ext._error_feedback._sparse_state import SparseAllreduceState, StepInfo
from sparse_collectives import AxisName, _axes, _varying, transport


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorFeedback:
    """Accumulates, exchanges, and keeps the undelivered entries.

    Attributes:
      exchange: reduces accumulators to the mean.
      options: the options that do not depend on the exchange.
      correction: momentum before the accumulation, or None.
      settings: all settings as text, except the local transformation.
    """

    exchange: Exchange
    options: Options
    correction: MomentumCorrection | None
    settings: _sparse_state.Settings

    def init(self, layout: _layout.TreeLayout) -> SparseAllreduceState:
        """The state for the part of a device before the first step."""
        options, correction = self.options, self.correction
        size, dense = self.exchange.part_size(layout.size), layout.dense_size
        workers = _trace_checks.workers(options.axis)
        selector, shared = self.exchange.init(layout, workers)
        info = _varying.to_varying(_sparse_state.with_lead(_sparse_state.no_info()), options.axis)
        local = _buffers.init_local(options.local, layout)
        settings = dataclasses.replace(
            self.settings, local=_buffers.describe(options.local, local), workers=workers
        )
        fields = {
            # One array for each, since two donated arguments cannot be the same array.
            **{name: jnp.zeros((), jnp.int32) for name in _COUNTERS},
            "missed": jnp.zeros((), jnp.int32) if options.every > 1 else (),
            "owner": _owner.mark(options.axis),
            "residual": jnp.zeros((_residual.width(size),), options.residual.dtype),
            "velocity": correction.init(size) if correction is not None and size else (),
            "dense_velocity": correction.init(dense) if correction is not None and dense else (),
            "local": local,
            "selector": selector,
            "allreduce": shared,
            # It is the same on all devices of a worker.
            "info": _sparse_state.joined(_sparse_state.no_info(), info),
        }
        rows = _sparse_state.as_rows(fields, options.axis, layout.device_axes)
        return SparseAllreduceState(**rows, layout=layout, settings=settings)

    def step(
        self,
        updates: Any,
        state: SparseAllreduceState,
        layout: _layout.TreeLayout,
        left_out: jax.Array,
    ) -> tuple[Any, SparseAllreduceState]:
        """One step for the part of a device; ``(updates, state)``.

        Args:
          updates: the gradients of the device, as leaves of ``layout``.
          state: the state of the device.
          layout: the layout of its part.
          left_out: ``i32[]``, entries of the gradients that are not in ``updates``.
        """
        options = self.options
        size = self.exchange.part_size(layout.size)
        _trace_checks.check_residual(state.residual, _residual.width(size), options.axis)
        loaded = self.load(updates, state, layout)
        buffers, all_finite, dropped = _nonfinite.guard(
            options.nonfinite,
            self._pending(loaded, state, layout),
            axis=self._who_decide(layout),
            workers=options.axis if options.every > 1 else (),
            count=state.count,
            left_out=loaded.left_out + left_out,
        )
        own, missed = None, state.missed
        if options.every > 1:
            # A worker leaves out its own step only, and others do not wait for it.
            own, all_finite = all_finite, None
            missed += dropped if own is None else (~own).astype(jnp.int32)
            dropped = jnp.zeros((), jnp.int32)
        mean, dense_mean, stepped = self.exchange.reduce(
            self._accumulate(buffers, all_finite, state, layout)
        )
        stepped = _of_all_devices(stepped, state, layout.device_axes)
        kept = _residual.store(
            # The seed of random rounding is the number of the step.
            stepped.residual,
            options.residual,
            axis=options.axis,
            count=state.count,
        )
        stepped = stepped._replace(
            count=state.count + 1,
            dropped=stepped.dropped + dropped,
            missed=missed,
            owner=_owner.renewed(state.owner, options.axis),
            residual=kept,
            local=_own_step(own, stepped, loaded.local, state.local),
            info=_reported(stepped.info, state.info),
        )
        if all_finite is not None:
            stepped = _unless_skipped(all_finite, stepped, state)
        saturate = options.nonfinite != "propagate"
        return _buffers.unravel(mean, dense_mean, layout, saturate=saturate), stepped

    def exchange_alone(
        self, state: SparseAllreduceState, layout: _layout.TreeLayout
    ) -> SparseAllreduceState:
        """The state with the result of an exchange of the residuals, for :mod:`._phases`.

        Raises:
          ValueError: options that a round in pieces cannot support.
        """
        _options.check_late(self.options.residual.decay, self.options.dense_steps)
        size = self.exchange.part_size(layout.size)
        residual = _residual.load(state.residual, size)
        waiting = _owner.own(residual, state.owner, self.options.axis)
        nothing = jnp.zeros_like(waiting)
        *_, exchanged = self.exchange.reduce(
            Accumulated(
                acc=waiting,
                pending=Pending(waiting, 1.0, nothing, nothing, nothing),
                dense_pending=None,
                state=state,
                layout=layout,
                all_finite=None,
                is_dense=None,
            )
        )
        return state._replace(allreduce=exchanged.allreduce)

    def _who_decide(self, layout: _layout.TreeLayout) -> AxisName:
        """The axes whose devices skip a step together: all workers and all their devices.

        In rounds a worker decides alone, or together with its node if the node shards its buffer.
        """
        axis = self.options.axis if self.options.every == 1 else self.exchange.shard_axis
        return (*_axes.axis_names(axis), *layout.device_axes) if layout.device_axes else axis

    def load(
        self, updates: Any, state: SparseAllreduceState, layout: _layout.TreeLayout
    ) -> _buffers.Loaded:
        """As :func:`._buffers.loaded`; for the shard of this worker if there are shards."""
        loaded = _buffers.loaded(
            self.options.local,
            updates,
            state.local,
            layout,
            axis=self.options.axis,
            drop=self.options.nonfinite == "drop",
        )
        if not layout.size:
            return loaded
        return loaded._replace(sparse=self.exchange.scatter(loaded.sparse))

    def _pending(
        self,
        loaded: _buffers.Loaded,
        state: SparseAllreduceState,
        layout: _layout.TreeLayout,
    ) -> list[Pending]:
        """The increments of the residual, with the momentum of the correction."""
        seen = iter(loaded.seen if self.correction is None else ())

        def part(residual, increment, velocity, bounded=False):
            # In the shape of the state, so that XLA adds in place if the state is donated.
            increment, old = increment[None], velocity
            if self.correction is not None and increment.size:
                velocity, increment = self.correction.update(velocity, increment)
            looked_at = next(seen, None) if increment.size else None
            return Pending(residual, decay, increment, velocity, old, bounded, looked_at)

        def own(value):
            return jax.tree.map(lambda x: _owner.own(x, state.owner, self.options.axis), value)

        decay = self._decay(state.count)
        bounded = self.exchange.may_keep_of_others(layout)
        residual = own(_residual.load(state.residual, self.exchange.part_size(layout.size)))
        parts = [part(residual, loaded.sparse, own(state.velocity), bounded)]
        if layout.dense_size:
            nothing = jnp.zeros((), jnp.float32)
            parts.append(part(nothing, loaded.dense, own(state.dense_velocity)))
        return parts

    def _decay(self, count: jax.Array) -> float | jax.Array:
        """The factor on the residual if step ``count`` proceeds."""
        decay, is_exchange = self.options.residual.decay, self._is_due(count, self._is_dense(count))
        if decay == 1.0 or is_exchange is None:
            return decay
        return jnp.where(is_exchange, jnp.float32(decay), 1.0)

    def _is_dense(self, count: jax.Array) -> jax.Array | None:
        """``bool[]``, whether step ``count`` is dense; None if no step is."""
        dense_steps = self.options.dense_steps
        if callable(dense_steps):
            return _options.whether_dense(dense_steps(count))
        return count < dense_steps if dense_steps else None

    def _is_due(self, count: jax.Array, is_dense: jax.Array | None) -> jax.Array | None:
        """``bool[]``, whether step ``count`` has an exchange; None if every step has one."""
        every = self.options.every
        if every == 1:
            return None
        is_exchange = (count + 1) % every == 0
        return is_exchange if is_dense is None else is_exchange | is_dense

    def _accumulate(
        self,
        buffers: list[Pending],
        all_finite: jax.Array | None,
        state: SparseAllreduceState,
        layout: _layout.TreeLayout,
    ) -> Accumulated:
        """The accumulator: residual plus increment, which a dense step moves to the increment."""
        pending, is_dense = buffers[0], self._is_dense(state.count)
        is_exchange = self._is_due(state.count, is_dense)
        decays = next(
            (x for x in (all_finite, is_exchange) if x is not None), jnp.ones((), jnp.bool_)
        )
        acc = _residual.decayed(pending.residual, self.options.residual, decays) + pending.increment
        if is_dense is not None:
            # A dense step also delivers the residual; a skipped step delivers nothing.
            goes = is_dense if all_finite is None else is_dense & all_finite
            nothing = jnp.zeros_like(acc)
            pending = pending._replace(increment=jnp.where(goes, acc, nothing))
            acc = jnp.where(goes, nothing, acc)
        return Accumulated(
            acc=acc,
            pending=pending,
            dense_pending=buffers[1] if layout.dense_size else None,
            state=state,
            layout=layout,
            all_finite=all_finite,
            is_dense=is_dense,
            is_exchange=is_exchange,
        )


def _of_all_devices(
    stepped: SparseAllreduceState, before: SparseAllreduceState, device_axes: tuple[Hashable, ...]
) -> SparseAllreduceState:
    """The counts of a step over all devices of a worker: sums, and the smallest thresholds.

    Cost: two allgathers of some words among these devices.
    """
    if not device_axes:
        return stepped
    info = stepped.info
    counts = [stepped.dropped - before.dropped, stepped.withheld - before.withheld]
    common = [info.delivered, *counts, info.global_threshold, info.words]
    own = [info.selected, info.overflow, info.arrived, info.local_threshold, info.useful]
    with jax.named_scope("sharded/info"):
        delivered, dropped, withheld, global_threshold, words = _over_devices(common, device_axes)
        selected, overflow, arrived, local_threshold, useful = _over_devices(own, device_axes)
    info = info._replace(
        delivered=jnp.sum(delivered, dtype=jnp.int32),
        global_threshold=jnp.min(global_threshold),
        words=jnp.sum(words),
        selected=jnp.sum(selected, dtype=jnp.int32),
        overflow=jnp.sum(overflow, dtype=jnp.int32),
        arrived=jnp.sum(arrived, dtype=jnp.int32),
        local_threshold=jnp.min(local_threshold),
        useful=jnp.sum(useful),
    )
    return stepped._replace(
        info=info,
        dropped=before.dropped + jnp.sum(dropped, dtype=jnp.int32),
        withheld=before.withheld + jnp.sum(withheld, dtype=jnp.int32),
    )


def _over_devices(numbers: list[jax.Array], device_axes: tuple[Hashable, ...]) -> list[jax.Array]:
    """Each number gathered from all devices of a worker, ``[m]``, in its dtype."""
    words = [lax.bitcast_convert_type(x, jnp.int32) for x in numbers]
    gathered = transport.all_gather(_varying.to_varying(jnp.stack(words), device_axes), device_axes)
    return [lax.bitcast_convert_type(gathered[:, i], x.dtype) for i, x in enumerate(numbers)]


def _reported(info: StepInfo, before: StepInfo) -> StepInfo:
    """The info with leading axes, and the drift of the threshold."""
    info = _sparse_state.per_worker(info, lambda x: x[None])
    old = before.local_threshold
    drift = jnp.where(old > 0, info.local_threshold / jnp.where(old > 0, old, 1.0), 1.0)
    return info._replace(threshold_drift=drift - 1.0)


def _own_step(own: jax.Array | None, stepped: SparseAllreduceState, taken: Any, before: Any) -> Any:
    """The state of the local transformation, unless this worker leaves out its own step."""
    if own is None:
        return taken
    held = _nonfinite.either(own, stepped.info.delivered, taken, before)
    return _buffers.with_schedules(held, taken)


_COUNTERS = "count", "skipped", "dropped", "withheld"
_BUFFERS = tuple(
    name
    for name in _roles.names(SparseAllreduceState, Rows.DEVICE, Rows.DENSE)
    if name in _roles.names(SparseAllreduceState, Role.SUMMED)
)


def _unless_skipped(
    all_finite: jax.Array, stepped: SparseAllreduceState, state: SparseAllreduceState
) -> SparseAllreduceState:
    """``stepped``, or ``state`` with one more skipped step.

    The buffers of the size of the parameters are already the same in both, except the buffers
    of a local transformation.
    """
    before = state._replace(skipped=state.skipped + 1)
    chosen = _nonfinite.either(all_finite, stepped.info.delivered, stepped, before)
    return chosen._replace(**{name: getattr(stepped, name) for name in _BUFFERS})
