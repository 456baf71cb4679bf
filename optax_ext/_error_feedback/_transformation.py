"""Error feedback as a transformation: each device takes the step for its part of the parameters.

The state has a row for each device of each worker, and the devices of a worker are adjacent, in the
order of the mesh. If parameters are not sharded, a worker is one device, and its part is all of
them. Inside the mapped region each device sees its own row, and the layout of its part.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_ext._error_feedback import (
    _buffers,
    _dense_leaves,
    _layout,
    _nonfinite,
    _param_sharding,
    _phases,
    _roles,
    _same_params,
    _sparse_state,
    _trace_checks,
)
from optax_ext._error_feedback._roles import Rows
from optax_ext._error_feedback._sparse_state import Settings, SparseAllreduceState
from optax_ext._error_feedback._step import ErrorFeedback
from sparse_collectives import _varying, transport


class Transformation:
    """``init`` and ``update`` of error feedback, for calls with a bound axis of the workers.

    Args:
      feedback: the state and the step of one device.
    """

    def __init__(self, feedback: ErrorFeedback):
        self._local = feedback.options.local
        # A transformation of whole leaves is applied before the devices take their parts.
        self._of_leaves = None if isinstance(self._local, _buffers.Elementwise) else self._local
        if self._of_leaves is not None:
            without = feedback.options._replace(local=None)
            feedback = dataclasses.replace(feedback, options=without)
        self._feedback = feedback

    def init(self, params: Any) -> SparseAllreduceState:
        """The state of a worker before the first step, or of a device if its axes are manual."""
        feedback, axis = self._feedback, self._feedback.options.axis
        workers = _trace_checks.workers(axis)
        given, placeholder = params, _layout.is_placeholder(params)
        if placeholder:  # Any parameters will do: no flat buffer is shaped like a parameter.
            params = jnp.zeros((128,), jnp.float32)
        labels = _dense_leaves.resolve(feedback.options.dense_leaves, params)
        layout = dataclasses.replace(
            _layout.layout_of(params, "params"), sharding=_param_sharding.sharding_of(params, axis)
        )
        _same_params.check(params, axis)
        part = _layout.device_layout(layout)
        # Shapes of the parts, since a flat run of a matrix is not a matrix.
        shapes = zip(part.shapes, part.dtypes, strict=True)
        parts = jax.tree.unflatten(part.treedef, [jax.ShapeDtypeStruct(*x) for x in shapes])
        dense = feedback.exchange.dense(parts, labels) or layout.dense
        layout = dataclasses.replace(layout, dense=dense, of_placeholder=placeholder)
        part = _layout.device_layout(layout)
        state = _layout.on_each_device(
            lambda: _stripped(feedback.init(part)),
            layout.sharding,
            axis,
            in_specs=(),
            out_specs=_specs(layout),
        )()
        if self._of_leaves is not None:
            # It sees whole leaves, and the compiler shards its state as it shards them.
            kept = _sparse_state.with_lead(_buffers.init_of_leaves(self._of_leaves, given))
            state = state._replace(local=_varying.to_varying(kept, axis))
        described = _buffers.describe(self._local, state.local)
        settings = dataclasses.replace(
            feedback.settings,
            local=described,
            workers=workers,
            by_leaf=self._of_leaves is not None,
        )
        return state._replace(layout=layout, settings=settings)

    def update(self, updates: Any, state: SparseAllreduceState, params: Any = None, **extra: Any):
        """One step; ``(updates, state)``. ``extra`` goes to the local transformation."""
        if state.settings.phase == _phases.EXCHANGE:
            # This phase has no gradients.
            part = _layout.device_layout(state.layout)
            return updates, self._feedback.exchange_alone(state, part)._replace(layout=state.layout)
        self._check_state(updates, state, params)
        # The tree is the tree of the gradients: flax boxes parameters, but not gradients.
        layout = dataclasses.replace(state.layout, treedef=jax.tree.structure(updates))
        updates = self._own(updates, state.layout)
        if not layout.shapes:
            return updates, state._replace(count=state.count + 1)
        updates, kept, left_out = self._transformed(updates, state, params, extra)
        before = _stripped(state)
        if self._of_leaves is not None:
            before = before._replace(local=())
        leaves, specs = _layout.specs_of(layout), _specs(layout)
        updates, new = _layout.on_each_device(
            lambda *args: self._on_device(layout, state.settings, *args),
            layout.sharding,
            self._feedback.options.axis,
            in_specs=(leaves, specs, PartitionSpec()),
            out_specs=(leaves, specs),
        )(updates, before, left_out)
        if self._of_leaves is not None:
            proceeds = self._has_stepped(new, state)
            held = jax.tree.map(lambda a, b: jnp.where(proceeds, a, b), kept, state.local)
            in_rounds = self._feedback.options.every > 1
            new = new._replace(local=_buffers.with_schedules(held, kept) if in_rounds else held)
        if not self._skips:
            new = new._replace(skipped=state.skipped)  # The same object: it never changes.
        return updates, new._replace(layout=state.layout, settings=state.settings)

    @property
    def _skips(self) -> bool:
        """Whether there are steps that all workers skip."""
        options = self._feedback.options
        return options.every == 1 and options.nonfinite in _nonfinite.SKIPS

    def _has_stepped(self, new: SparseAllreduceState, old: SparseAllreduceState) -> jax.Array:
        """``bool[]``, whether this worker's gradient was accumulated."""
        options = self._feedback.options
        if options.every == 1:
            return new.skipped == old.skipped
        # With the other policies it always is, if without some of its entries.
        leaves_out = options.nonfinite in _nonfinite.SKIPS
        return (new.missed == old.missed)[0] if leaves_out else jnp.ones((), jnp.bool_)

    def _on_device(
        self,
        layout: _layout.TreeLayout,
        settings: Settings,
        updates: Any,
        state: Any,
        left_out: jax.Array,
    ) -> Any:
        """The step of a device, for the shards that it holds."""
        feedback, part = self._feedback, _layout.device_layout(layout)
        state = state._replace(layout=part, settings=settings)
        mine = _layout.take(updates, layout)
        # All devices of a worker have the same count, so only the first one adds it.
        first = transport.axis_index(part.device_axes) == 0
        mine, new = feedback.step(mine, state, part, jnp.where(first, left_out, 0))
        return _layout.gather(mine, layout), _stripped(new)

    def _transformed(
        self, updates: Any, state: SparseAllreduceState, params: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, Any, jax.Array]:
        """As :func:`._buffers.transformed`, if there is a transformation of leaves."""
        if self._of_leaves is None:
            return updates, state.local, jnp.zeros((), jnp.int32)
        options = self._feedback.options
        return _buffers.transformed(
            self._of_leaves,
            updates,
            state.local,
            params,
            axis=options.axis,
            drop=options.nonfinite == "drop",
            extra=extra,
        )

    def _check_state(self, updates: Any, state: SparseAllreduceState, params: Any) -> None:
        feedback = self._feedback
        _trace_checks.check_settings(state.settings, feedback.settings)
        if state.workers == 1:  # Another number of rows is reported by check_residual.
            _trace_checks.check_workers(state.settings, feedback.options.axis)
        _trace_checks.warn_without_ahead(updates, state, params)

    def _own(self, updates: Any, layout: _layout.TreeLayout) -> Any:
        """The updates of this worker, checked: shards if the axes are manual, else whole leaves."""
        sharding, shapes, axis = layout.sharding, layout.shapes, self._feedback.options.axis
        manual = _layout.is_manual(sharding)
        if manual:
            shapes = tuple(sharding.shard_shape(i, shape) for i, shape in enumerate(shapes))
        expected = dataclasses.replace(
            layout, shapes=shapes, sharding=_layout.unsharded(shapes), of_placeholder=False
        )
        got = _layout.layout_of(updates, "updates", layout.dense)
        _trace_checks.workers(axis)
        _trace_checks.check_layout(expected, got)
        if layout.shapes:
            updates = _trace_checks.own_gradients(updates, axis)
        if manual:
            frees = [sharding.free(i) for i in range(len(shapes))]
            _trace_checks.check_same_on_devices(updates, frees, axis)
        return updates


def _stripped(state: SparseAllreduceState) -> Any:
    """The arrays only: layout and settings differ between the inside and outside of the region."""
    return state._replace(layout=None, settings=None)  # pyright: ignore[reportArgumentType]


_SPLIT = _roles.names(SparseAllreduceState, Rows.DEVICE, Rows.DENSE, Rows.SHARD)


def _specs(layout: _layout.TreeLayout) -> Any:
    """The specs of a stripped state, over the axes of the sharding."""
    specs: dict[str, Any] = dict.fromkeys(SparseAllreduceState._fields, PartitionSpec())
    specs |= dict.fromkeys(_SPLIT, PartitionSpec(layout.sharding.axes))
    return SparseAllreduceState(**{**specs, "layout": None, "settings": None})
