"""The state and the step of :func:`sparse_allreduce`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._step import (
    _buffer,
    _checks,
    _dense_leaves,
    _density_schedule,
    _exchange,
    _nonfinite,
    _residual,
    _settings,
    _sparse_state,
    _xi,
)
from optax_ext._step._momentum_correction import MomentumCorrection
from optax_ext._step._sparse_state import ShardState, SparseAllreduceState, StepInfo
from sparse_collectives import Layout, Selector, SparseAllreduce, _compat, _volumes, transport
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce import Hierarchical, _hierarchical


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorFeedback:
    """Checked options of :func:`sparse_allreduce`, which documents them."""

    selector: Selector
    allreduce: SparseAllreduce | Hierarchical
    axis: AxisName
    axis_size: int | None
    learning_rate: Callable[[jax.Array], Any] | None
    nonfinite: str
    correction: MomentumCorrection | None
    density_schedule: _density_schedule.DensitySchedule | None
    dense_steps: int
    dense_leaves: Any
    residual: _residual.Residual
    xi_every: int
    settings: _settings.Settings

    @property
    def hierarchy(self) -> Hierarchical | None:
        """The allreduce, where it is hierarchical."""
        return self.allreduce if isinstance(self.allreduce, Hierarchical) else None

    def init(self, params: Any) -> SparseAllreduceState:
        """The state before the first step."""
        labels = _dense_leaves.resolve(self.dense_leaves, params)
        layout = _buffer.layout_of(params, "params", labels)
        bound = _compat.axis_is_bound(self.axis)
        workers = _checks.workers_at_init(self.axis, self.axis_size, bound)
        lead = 1 if bound else workers
        size = layout.size
        selector_layout = Layout(layout.sparse_shapes) if size else None
        if self.hierarchy is not None:
            _checks.check_bound_for_hierarchy(self.axis, bound)
            # A shard cuts through layers: to the selector it is one.
            selector_layout = size = _shard_size(self.hierarchy, size)
        correction, dense = self.correction, layout.dense_size
        local = (
            jnp.zeros((size,), self.residual.dtype),
            correction.init(size) if correction is not None else (),
            correction.init(dense) if correction is not None and dense else (),
            self.selector.init(selector_layout) if size else (),
            _sparse_state.no_info(),
        )
        local = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (lead, *x.shape)), local)
        if bound:
            local = _compat.to_varying(local, self.axis)
        residual, velocity, dense_velocity, selector_state, info = local
        return SparseAllreduceState(
            count=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            dropped=jnp.zeros((), jnp.int32),
            clipped=jnp.zeros((), jnp.int32),
            residual=residual,
            velocity=velocity,
            dense_velocity=dense_velocity,
            selector=selector_state,
            allreduce=_init_allreduce(self.allreduce, layout.size, workers) if size else (),
            info=_joined(_sparse_state.no_info(), info),
            layout=layout,
            settings=self.settings,
        )

    def update(self, updates: Any, state: SparseAllreduceState, params: Any = None):
        """One step; ``(updates, state)``."""
        del params
        axis, hierarchy = self.axis, self.hierarchy
        layout = _buffer.layout_of(updates, "updates", state.layout.dense)
        workers = _checks.workers_at_update(axis, self.axis_size)
        _checks.check_layout(state.layout, layout)
        if not layout.shapes:
            return updates, state._replace(count=state.count + 1)
        size = layout.size if hierarchy is None else _shard_size(hierarchy, layout.size)
        _checks.check_residual(state.residual, size, workers, axis)
        _checks.check_local_gradients(updates, axis)

        gradient, dense_gradient = _buffer.ravel(updates, layout)
        if hierarchy is not None and layout.size:
            gradient = hierarchy.scatter(gradient)
        part, dense_part = self._parts(state, gradient, dense_gradient)
        is_dense = state.count < self.dense_steps
        guarded = _nonfinite.guard(
            self.nonfinite,
            [part, dense_part] if layout.dense_size else [part],
            axis=axis,
            count=state.count,
        )
        proceeds, parts = guarded.proceeds, guarded.parts
        stepped = state._replace(count=state.count + 1, dropped=state.dropped + guarded.dropped)
        if layout.size:
            mean, stepped = self._sparse_step(parts[0], state, stepped, is_dense, proceeds)
            mean = mean if hierarchy is None else hierarchy.gather(mean, layout.size)
        else:
            mean = jnp.zeros((0,), jnp.float32)
            nothing = jax.tree.map(jnp.zeros_like, state.info)
            stepped = stepped._replace(
                info=_sparse_state.per_worker(nothing, lambda x: _compat.to_varying(x, axis))
            )
        dense_mean = dense_gradient
        if layout.dense_size:
            dense_mean = transport.psum(parts[1].increment[0], axis) / workers
            stepped = stepped._replace(
                dense_velocity=parts[1].velocity,
                info=_with_words(stepped.info, _volumes.all_reduce(layout.dense_size, workers)),
            )
        if proceeds is not None:
            stepped = _unless_skipped(proceeds, stepped, state)
        return _buffer.unravel(mean, dense_mean, layout), stepped

    def _parts(
        self, state: SparseAllreduceState, gradient: jax.Array, dense_gradient: jax.Array
    ) -> tuple[_nonfinite.Part, _nonfinite.Part]:
        """What is to be accumulated: scaled, and with the momentum of the correction."""

        def part(residual, increment, velocity):
            if self.learning_rate is not None:
                rate = jnp.asarray(self.learning_rate(state.count), jnp.float32)
                increment = increment * rate
            # In the shape of the state: XLA then adds in place where it is donated.
            increment, old = increment[None], velocity
            if self.correction is not None and increment.size:
                velocity, increment = self.correction.update(velocity, increment)
            return _nonfinite.Part(residual, increment, velocity, old)

        return (
            part(_residual.load(state.residual), gradient, state.velocity),
            part(0.0, dense_gradient, state.dense_velocity),
        )

    def _sparse_step(
        self,
        part: _nonfinite.Part,
        state: SparseAllreduceState,
        stepped: SparseAllreduceState,
        is_dense: jax.Array,
        proceeds: jax.Array | None,
    ) -> tuple[jax.Array, SparseAllreduceState]:
        """Selects, exchanges and keeps the rest; the mean and the next state."""
        axis, hierarchy = self.axis, self.hierarchy
        increment, dense_steps = part.increment, self.dense_steps
        decays = ~is_dense if proceeds is None else ~is_dense & proceeds
        accumulated = _residual.decayed(part.residual, self.residual, decays) + (
            jnp.where(is_dense, 0.0, increment) if dense_steps else increment
        )
        selector_state = _sparse_state.without_lead(state.selector)
        allreduce_state = state.allreduce
        if hierarchy is not None:
            allreduce_state = _sparse_state.without_lead(allreduce_state.state)

        def sparse() -> _exchange.Exchanged:
            return _exchange.sparse(
                accumulated[0],
                selector_state,
                allreduce_state,
                selector=self.selector,
                allreduce=self.allreduce,
                axis=axis,
                proceeds=proceeds,
                schedule=self.density_schedule,
                count=state.count,
            )

        if dense_steps:
            shapes = jax.eval_shape(sparse)
            like = shapes._replace(selector=selector_state, allreduce=allreduce_state)
            # All workers, and all groups of a larger mesh, have the same count.
            result = lax.cond(
                is_dense,
                lambda: _exchange.typed_per_worker(
                    _exchange.dense(increment[0], like, axis=axis, hierarchy=hierarchy), axis
                ),
                lambda: _exchange.typed_per_worker(sparse(), axis),
            )
        else:
            result = sparse()
        kept = _exchange.keep_undelivered(accumulated, result.sent, result.undelivered)
        arrived = _exchange.delivered_of(result.sent, kept)
        velocity = part.velocity
        if self.correction is not None:
            velocity = self.correction.mask(velocity, result.sent.indices, arrived)
        allreduce_state = result.allreduce
        if hierarchy is not None:
            allreduce_state = _shard_state(allreduce_state, hierarchy)
        info = result.info._replace(arrived=jnp.sum(arrived, dtype=jnp.int32))
        if self.xi_every:
            measured = (state.count % self.xi_every == 0) & ~is_dense
            arrays = (accumulated[0], increment[0], result.mean, info.delivered)
            xi = lax.cond(
                measured,
                lambda: _xi.xi(*arrays, axis=axis, hierarchy=hierarchy),
                lambda: state.info.xi,
            )
            info = info._replace(xi=xi)
        info = _sparse_state.per_worker(info, lambda x: x[None])
        before = state.info.local_threshold
        drift = jnp.where(before > 0, info.local_threshold / jnp.where(before > 0, before, 1), 1)
        return result.mean, stepped._replace(
            clipped=state.clipped + result.clipped,
            residual=_residual.store(kept, self.residual, axis=axis, count=state.count),
            velocity=velocity,
            selector=_sparse_state.with_lead(result.selector),
            allreduce=allreduce_state,
            info=info._replace(threshold_drift=drift - 1),
        )


def _unless_skipped(
    proceeds: jax.Array, stepped: SparseAllreduceState, state: SparseAllreduceState
) -> SparseAllreduceState:
    """``stepped``, or ``state`` with one more skipped step.

    The buffers of the size of the parameters are the same in both already.
    """
    skipped = state._replace(skipped=state.skipped + 1)
    chosen = jax.tree.map(
        lambda new, old: new if new is old else jnp.where(proceeds, new, old), stepped, skipped
    )
    return chosen._replace(
        residual=stepped.residual,
        velocity=stepped.velocity,
        dense_velocity=stepped.dense_velocity,
    )


def _joined(common: StepInfo, local: StepInfo) -> StepInfo:
    """``common`` with the per-worker fields of ``local``."""
    return common._replace(**{name: getattr(local, name) for name in _sparse_state.PER_WORKER})


def _with_words(info: StepInfo, words: float) -> StepInfo:
    return info._replace(words=info.words + words, useful=info.useful + words)


def _shard_size(hierarchy: Hierarchical, size: int) -> int:
    return _hierarchical.shard_size(size, transport.axis_size(hierarchy.inner_axis))


def _init_allreduce(allreduce: SparseAllreduce | Hierarchical, size: int, workers: int) -> Any:
    if isinstance(allreduce, SparseAllreduce):
        return allreduce.init(size, workers)
    state = allreduce.init(size, workers, transport.axis_size(allreduce.inner_axis))
    return _shard_state(_compat.to_varying(state, allreduce.inner_axis), allreduce)


def _shard_state(state: Any, hierarchy: Hierarchical) -> ShardState:
    inner_axis = _compat.static_axis(hierarchy.inner_axis)
    return ShardState(jax.tree.map(lambda x: x[None], state), inner_axis)
