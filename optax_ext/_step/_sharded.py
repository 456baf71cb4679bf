"""Error feedback of parameters that are sharded: each device takes the step of its part.

The state has a row for each device of each worker where one of whole parameters has a row for
each worker: the devices of a worker are side by side, in the order of the mesh. Inside the region
each device sees its own row, and the layout of its part, so that nothing there is new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from optax_ext._step import _checks, _layout, _local, _sharding, _sparse_state
from optax_ext._step._contract import Reduced
from optax_ext._step._sharding import Sharding
from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import extend, transport

if TYPE_CHECKING:
    from optax_ext._step._error_feedback import ErrorFeedback


def init(
    feedback: ErrorFeedback, params: Any, labels: tuple[bool, ...] | None, sharding: Sharding
) -> SparseAllreduceState:
    """The state of one worker, of all of its devices or, where they are manual, of one."""
    layout = dataclasses.replace(_layout.layout_of(params, "params"), sharding=sharding)
    part = _sharding.part_layout(layout)
    # Of the parts: a run of a matrix is no matrix.
    shapes = zip(part.shapes, part.dtypes, strict=True)
    parts = jax.tree.unflatten(part.treedef, [jnp.zeros(*x) for x in shapes])
    layout = dataclasses.replace(
        layout, dense=feedback.exchange.dense(parts, labels) or layout.dense
    )
    part = _sharding.part_layout(layout)
    inside, local = _apart(feedback)

    def start() -> Any:
        return _stripped(inside.start(part, None))

    specs = _specs(layout)
    state = _sharding.on_each_device(
        start, sharding, feedback.options.axis, in_specs=(), out_specs=specs
    )()
    if local is not None:
        # It sees whole leaves, and the compiler splits what it keeps as it splits them.
        kept = _sparse_state.with_lead(_local.init(local, params, layout))
        state = state._replace(local=extend.to_varying(kept, feedback.options.axis))
    described = _local.describe(feedback.options.local, state.local)
    workers = _checks.workers(feedback.options.axis)
    return state._replace(
        layout=layout,
        settings=dataclasses.replace(feedback.settings, local=described, workers=workers),
    )


def update(
    feedback: ErrorFeedback,
    updates: Any,
    state: SparseAllreduceState,
    params: Any,
    extra: Mapping[str, Any],
):
    """One step; ``(updates, state)``."""
    layout, axis = state.layout, feedback.options.axis
    part, sharding = _sharding.part_layout(layout), layout.sharding
    _check(updates, layout, axis)
    if not layout.shapes:
        return updates, state._replace(count=state.count + 1)
    inside, local = _apart(feedback)
    left_out, kept = jnp.zeros((), jnp.int32), state.local
    if local is not None:
        updates, kept, left_out = _local.of_leaves(
            local,
            updates,
            state.local,
            params,
            axis=axis,
            drop=feedback.options.nonfinite == "drop",
            extra=extra,
        )

    def step(updates: Any, state: Any, left_out: jax.Array) -> Any:
        state = state._replace(layout=part, settings=feedback.settings)
        first = transport.axis_index(part.part_axes) == 0
        mine, new = inside.step(
            _sharding.take(updates, layout),
            state,
            None,
            part,
            {},
            # All devices of a worker have counted the same.
            left_out=jnp.where(first, left_out, 0),
        )
        return _sharding.gather(mine, layout), _stripped(new)

    specs = _specs(layout)
    leaves = _sharding.specs_of(layout).leaves
    before = _stripped(state)._replace(local=() if local is not None else state.local)
    updates, new = _sharding.on_each_device(
        step,
        sharding,
        axis,
        in_specs=(leaves, specs, PartitionSpec()),
        out_specs=(leaves, specs),
    )(updates, before, left_out)
    if local is not None:
        proceeds = new.skipped == state.skipped
        kept = jax.tree.map(lambda a, b: jnp.where(proceeds, a, b), kept, state.local)
        new = new._replace(local=kept)
    return updates, new._replace(layout=layout, settings=state.settings)


def of_all_parts(result: Reduced, part_axes: tuple[Hashable, ...]) -> Reduced:
    """What a step did, of all devices of a worker: sums, and of thresholds the smallest.

    Cost: two allgathers of some words among them.
    """
    if not part_axes:
        return result
    info = result.info
    common = [info.delivered, result.dropped, result.withheld, info.global_threshold, info.words]
    own = [info.selected, info.overflow, info.arrived, info.local_threshold, info.useful]
    with jax.named_scope("sharded/info"):
        delivered, dropped, withheld, global_threshold, words = _over_parts(common, part_axes)
        selected, overflow, arrived, local_threshold, useful = _over_parts(own, part_axes)
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
    return result._replace(
        info=info,
        dropped=jnp.sum(dropped, dtype=jnp.int32),
        withheld=jnp.sum(withheld, dtype=jnp.int32),
    )


def _over_parts(numbers: list[jax.Array], part_axes: tuple[Hashable, ...]) -> list[jax.Array]:
    """Each number of all devices of a worker, ``[m]``, in its dtype."""
    words = [lax.bitcast_convert_type(x, jnp.int32) for x in numbers]
    gathered = transport.all_gather(extend.to_varying(jnp.stack(words), part_axes), part_axes)
    return [lax.bitcast_convert_type(gathered[:, i], x.dtype) for i, x in enumerate(numbers)]


def _apart(feedback: ErrorFeedback) -> tuple[ErrorFeedback, Any]:
    """What a device does with its part, and a transformation that looks at whole leaves."""
    local = feedback.options.local
    if local is None or isinstance(local, _local.Elementwise):
        return feedback, None
    without = feedback.options._replace(local=None)
    return dataclasses.replace(feedback, options=without), local


def _stripped(state: SparseAllreduceState) -> Any:
    """The arrays: layout and settings are of a part inside, and of the whole outside."""
    return state._replace(layout=None, settings=None)  # pyright: ignore[reportArgumentType]


def _specs(layout: _layout.TreeLayout) -> Any:
    """The specs of a stripped state, over the axes of the sharding."""
    split, whole = PartitionSpec(layout.sharding.axes), PartitionSpec()
    specs: dict[str, Any] = dict.fromkeys(SparseAllreduceState._fields, split)
    for name in ("count", "skipped", "dropped", "withheld", "owner", "limit", "info"):
        specs[name] = whole
    return SparseAllreduceState(**{**specs, "layout": None, "settings": None})


def _check(updates: Any, layout: _layout.TreeLayout, axis: Any) -> None:
    """Shards where the axes are manual, and else whole leaves."""
    sharding = layout.sharding
    expected = dataclasses.replace(layout, sharding=None)
    if _sharding.is_manual(sharding):
        shapes = (sharding.shard_shape(i, shape) for i, shape in enumerate(layout.shapes))
        expected = dataclasses.replace(expected, shapes=tuple(shapes))
    got = _layout.layout_of(updates, "updates", layout.dense)
    _checks.workers(axis)
    _checks.check_layout(expected, got)
    _checks.check_local_gradients(updates, axis)
    if _sharding.is_manual(sharding):
        frees = [sharding.free(i) for i in range(len(layout.shapes))]
        _checks.check_same_on_devices(updates, frees, axis)
