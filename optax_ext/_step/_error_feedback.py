"""The state and the step of :func:`sparse_allreduce`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext._step import (
    _checks,
    _dense_leaves,
    _exchange,
    _layout,
    _local,
    _nonfinite,
    _residual,
    _settings,
    _sparse_state,
)
from optax_ext._step._exchange import Exchange, Exchanged
from optax_ext._step._momentum_correction import MomentumCorrection
from optax_ext._step._nonfinite import Part
from optax_ext._step._sparse_state import SparseAllreduceState, StepInfo
from sparse_collectives import Layout, Selector, SparseAllreduce, extend, transport
from sparse_collectives.extend import AxisName


class Loaded(NamedTuple):
    """What a worker brings to a step.

    Attributes:
      gradient: ``f32[m]``, of its shard where there are shards.
      dense_gradient: ``f32[d]``, of the leaves that go dense.
      local: the next state of the local transformation.
      left_out: ``i32[]``, entries of the gradient that it was not shown.
    """

    gradient: jax.Array
    dense_gradient: jax.Array
    local: Any
    left_out: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorFeedback:
    """Checked options of :func:`sparse_allreduce`, which documents them."""

    selector: Selector
    allreduce: SparseAllreduce
    axis: AxisName
    nonfinite: str
    local: optax.GradientTransformation | None
    correction: MomentumCorrection | None
    residual: _residual.Residual
    dense_steps: int
    dense_leaves: Any
    settings: _settings.Settings

    def init(self, params: Any) -> SparseAllreduceState:
        """The state before the first step, of one worker."""
        workers = _checks.workers(self.axis)
        labels = _dense_leaves.resolve(self.dense_leaves, params)
        layout = _layout.layout_of(params, "params", labels)
        size = self._part_size(layout.size)
        shared = self.allreduce.init(layout.size, workers) if size else ()
        shown = self._shown_size(size, shared)
        # A part cuts through layers: to the selector it is one.
        whole = size and shown == layout.size
        selector_layout = Layout(layout.sparse_shapes) if whole else shown
        correction, dense = self.correction, layout.dense_size
        per_worker = (
            jnp.zeros((size,), self.residual.dtype),
            correction.init(size) if correction is not None else (),
            correction.init(dense) if correction is not None and dense else (),
            _local.init(self.local, params),
            self.selector.init(selector_layout) if size else (),
            _sparse_state.no_info(),
        )
        per_worker = extend.to_varying(_sparse_state.with_lead(per_worker), self.axis)
        residual, velocity, dense_velocity, local, selector, info = per_worker
        if self.allreduce.shard_axis:
            shared = extend.to_varying(shared, self.allreduce.shard_axis)
        counters = {
            name: jnp.zeros((), jnp.int32) for name in ("count", "skipped", "dropped", "withheld")
        }
        return SparseAllreduceState(
            **counters,
            residual=residual,
            velocity=velocity,
            dense_velocity=dense_velocity,
            local=local,
            selector=selector,
            allreduce=_sparse_state.with_lead(shared),
            info=_sparse_state.joined(_sparse_state.no_info(), info),
            layout=layout,
            settings=dataclasses.replace(self.settings, local=_local.describe(self.local, local)),
        )

    def update(self, updates: Any, state: SparseAllreduceState, params: Any = None):
        """One step; ``(updates, state)``."""
        layout = self._check(updates, state)
        if not layout.shapes:
            return updates, state._replace(count=state.count + 1)
        loaded = self._load(updates, state, params, layout)
        parts = self._accumulate(loaded, state, layout)
        guarded = _nonfinite.guard(
            self.nonfinite, parts, axis=self.axis, count=state.count, left_out=loaded.left_out
        )
        stepped = state._replace(
            count=state.count + 1, dropped=state.dropped + guarded.dropped, local=loaded.local
        )
        mean = jnp.zeros((0,), jnp.float32)
        info = _sparse_state.per_worker(
            _sparse_state.no_info(), lambda x: extend.to_varying(x, self.axis)
        )
        if layout.size:
            acc, result = self._exchange(guarded.parts[0], state, layout, guarded.proceeds)
            stepped, info = self._keep(acc, guarded.parts[0], result, stepped)
            mean = self.allreduce.gather(result.mean, layout.size)
        dense_mean = loaded.dense_gradient
        if layout.dense_size:
            dense_mean, stepped, words = self._dense_mean(guarded.parts[-1], stepped)
            info = info._replace(words=info.words + words, useful=info.useful + words)
        stepped = stepped._replace(info=_reported(info, state.info))
        if guarded.proceeds is not None:
            stepped = _unless_skipped(guarded.proceeds, stepped, state)
        saturate = self.nonfinite != "propagate"
        return _layout.unravel(mean, dense_mean, layout, saturate=saturate), stepped

    def _check(self, updates: Any, state: SparseAllreduceState) -> _layout.TreeLayout:
        """Everything that can be wrong with a call, before anything is computed."""
        layout = _layout.layout_of(updates, "updates", state.layout.dense)
        workers = _checks.workers(self.axis)
        _checks.check_layout(state.layout, layout)
        if layout.shapes:
            size = self._part_size(layout.size)
            _checks.check_residual(state.residual, size, workers, self.axis)
            _checks.check_local_gradients(updates, self.axis)
        return layout

    def _load(
        self, updates: Any, state: SparseAllreduceState, params: Any, layout: _layout.TreeLayout
    ) -> Loaded:
        """The local transformation, and the leaves as flat buffers."""
        left_out = jnp.zeros((), jnp.int32)
        if self.local is not None and self.nonfinite == "drop":
            # Else one of them would stay in the state of the transformation for good.
            updates, left_out = _nonfinite.zeroed(updates)
        updates, local = _local.update(self.local, updates, state.local, params, self.axis)
        gradient, dense_gradient = _layout.ravel(updates, layout)
        if layout.size:
            gradient = self.allreduce.scatter(gradient)
        return Loaded(gradient, dense_gradient, local, left_out)

    def _accumulate(
        self, loaded: Loaded, state: SparseAllreduceState, layout: _layout.TreeLayout
    ) -> list[Part]:
        """What is to be added to the residual, with the momentum of the correction."""

        def part(residual, increment, velocity):
            # In the shape of the state: XLA then adds in place where it is donated.
            increment, old = increment[None], velocity
            if self.correction is not None and increment.size:
                velocity, increment = self.correction.update(velocity, increment)
            return Part(residual, self.residual.decay, increment, velocity, old)

        parts = [part(_residual.load(state.residual), loaded.gradient, state.velocity)]
        if layout.dense_size:
            nothing = jnp.zeros((), jnp.float32)
            parts.append(part(nothing, loaded.dense_gradient, state.dense_velocity))
        return parts

    def _exchange(
        self,
        part: Part,
        state: SparseAllreduceState,
        layout: _layout.TreeLayout,
        proceeds: jax.Array | None,
    ) -> tuple[jax.Array, Exchanged]:
        """Selects from the accumulator, ``f32[1, m]``, and exchanges; both are returned."""
        is_dense = state.count < self.dense_steps
        decays = ~is_dense if proceeds is None else ~is_dense & proceeds
        increment = part.increment
        if self.dense_steps:
            increment = jnp.where(is_dense, jnp.zeros_like(increment), increment)
        acc = _residual.decayed(part.residual, self.residual, decays) + increment
        parts = Exchange(self.selector, self.allreduce, self.axis, self.nonfinite)
        selector_state = _sparse_state.without_lead(state.selector)
        allreduce_state = _sparse_state.without_lead(state.allreduce)

        def sparse() -> Exchanged:
            return _exchange.sparse(
                acc[0],
                selector_state,
                allreduce_state,
                parts=parts,
                layout=layout,
                proceeds=proceeds,
            )

        if not self.dense_steps:
            return acc, sparse()
        shapes = jax.eval_shape(sparse)
        like = shapes._replace(selector=selector_state, allreduce=allreduce_state)
        # All workers, and all groups of a larger mesh, have the same count.
        return acc, _exchange.dense_or_sparse(
            is_dense,
            lambda: _exchange.dense(part.increment[0], like, parts=parts),
            sparse,
            self.axis,
        )

    def _keep(
        self, acc: jax.Array, part: Part, result: Exchanged, stepped: SparseAllreduceState
    ) -> tuple[SparseAllreduceState, StepInfo]:
        """The residual and all else that stays with this worker; the info of the step."""
        kept = result.undelivered.residual(acc, result.sent)
        arrived = _exchange.delivered_of(result, kept)
        kept = _exchange.with_rounding(kept, result.rounding)
        velocity = part.velocity
        if self.correction is not None:
            velocity = self.correction.mask(velocity, result.sent.indices, arrived)
            whole = result.undelivered.instead
            if whole is not None:
                # All that this worker had of an entry that others selected has gone, too.
                everywhere = jnp.ones(whole.indices.shape, jnp.bool_)
                velocity = self.correction.mask(velocity, whole.indices, everywhere)
        # The seed of random rounding is the number of the step.
        step = stepped.count - 1
        stepped = stepped._replace(
            dropped=stepped.dropped + result.dropped,
            withheld=stepped.withheld + result.withheld,
            residual=_residual.store(kept, self.residual, axis=self.axis, count=step),
            velocity=velocity,
            selector=_sparse_state.with_lead(result.selector),
            allreduce=_sparse_state.with_lead(result.allreduce),
        )
        return stepped, result.info._replace(arrived=jnp.sum(arrived, dtype=jnp.int32))

    def _dense_mean(
        self, part: Part, stepped: SparseAllreduceState
    ) -> tuple[jax.Array, SparseAllreduceState, jax.Array]:
        """The mean of the leaves that go dense, and the words that it takes."""
        workers = transport.axis_size(self.axis)
        total = transport.psum(part.increment[0], self.axis)
        mean, dropped = _nonfinite.dense_mean(self.nonfinite, total, workers)
        stepped = stepped._replace(dense_velocity=part.velocity, dropped=stepped.dropped + dropped)
        return mean, stepped, jnp.float32(extend.all_reduce(mean.shape[0], workers))

    def _shown_size(self, size: int, shared: Any) -> int:
        """Entries that a worker selects from at one step, of the ``size`` that it holds."""
        if not size:
            return 0

        def show(acc):
            return self.allreduce.show(acc, shared, axis=self.axis)

        return jax.eval_shape(show, jax.ShapeDtypeStruct((size,), jnp.float32)).shape[0]

    def _part_size(self, size: int) -> int:
        """Entries of the buffer that one worker holds."""
        inside = transport.axis_size(self.allreduce.shard_axis)
        return extend.shard_size(size, inside)


def _reported(info: StepInfo, before: StepInfo) -> StepInfo:
    """The info with leading axes, and the drift of the threshold."""
    info = _sparse_state.per_worker(info, lambda x: x[None])
    old = before.local_threshold
    drift = jnp.where(old > 0, info.local_threshold / jnp.where(old > 0, old, 1.0), 1.0)
    return info._replace(threshold_drift=drift - 1.0)


def _unless_skipped(
    proceeds: jax.Array, stepped: SparseAllreduceState, state: SparseAllreduceState
) -> SparseAllreduceState:
    """``stepped``, or ``state`` with one more skipped step.

    The buffers of the size of the parameters are the same in both already, but for those of
    a local transformation.
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
