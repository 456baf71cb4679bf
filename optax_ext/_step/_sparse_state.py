"""The state of :func:`optax_ext.sparse_allreduce`, and which parts belong to one worker."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext._step import _buffer, _settings
from sparse_collectives._types import AxisName


class StepInfo(NamedTuple):
    """What the last step did. Zeros before the first.

    Attributes:
      selected: ``i32[1]`` for each worker: entries it selected to be sent.
      delivered: ``i32[]``: entries in the update that every worker applied.
      overflow: ``i32[1]`` for each worker: entries that found no slot.
      local_threshold: ``f32[1]`` for each worker: magnitude it selected by.
      global_threshold: ``f32[]``: magnitude of the global selection.
      words: ``f32[]``: 4-byte words each worker received in the allreduce, padding
        included.
      useful: ``f32[1]`` for each worker: words of its messages that are no padding. The
        mean over the workers, divided by ``words``, is the occupancy.
      arrived: ``i32[1]`` for each worker: of the entries it selected, those that are in
        the update. Of the others it keeps the whole value.
      threshold_drift: ``f32[1]`` for each worker: its threshold relative to that of the
        step before, minus 1. Of a threshold in a steady state it is about 0.
      xi: ``f32[]``: the constant of Ok-Topk's convergence proof, from the last step that
        measured it (``xi_every``).
    """

    selected: jax.Array
    delivered: jax.Array
    overflow: jax.Array
    local_threshold: jax.Array
    global_threshold: jax.Array
    words: jax.Array
    useful: jax.Array
    arrived: jax.Array
    threshold_drift: jax.Array
    xi: jax.Array


# The fields that differ between the workers.
PER_WORKER = ("selected", "overflow", "local_threshold", "useful", "arrived", "threshold_drift")


class SparseAllreduceState(NamedTuple):
    """State of :func:`sparse_allreduce`.

    Fields marked "for each worker" differ between the workers: every array in
    them has a leading axis, of size 1 inside the mapped function and of size P
    outside, sharded over the axis. The others are the same on every worker.
    :func:`optax_ext.state_specs` gives the matching PartitionSpecs.

    Attributes:
      count: ``i32[]``, steps taken, skipped ones left out.
      skipped: ``i32[]``, steps skipped because of a non-finite gradient.
      dropped: ``i32[]``, entries of all workers left out with ``nonfinite='drop'``.
      clipped: ``i32[]``, steps whose ``density_schedule`` was out of range.
      residual: ``f32[1, n]`` for each worker: what it has not delivered yet, or
        ``bf16[1, n]`` with ``residual_dtype``. Leaves that go dense have none. With
        :func:`~sparse_collectives.allreduce.hierarchical` it is that of its shard,
        ``f32[1, ceil(n / w)]`` for w workers in a node.
      velocity: as ``residual``, for each worker: the momentum of its gradients; ``()``
        without a ``correction``.
      dense_velocity: ``f32[1, m]``, for each worker: the same for the leaves that go
        dense; ``()`` without these or a ``correction``.
      selector: the selector's state, for each worker.
      allreduce: the allreduce's state; a :class:`ShardState` with ``hierarchical``.
      info: :class:`StepInfo` of the last step.
      layout: the tree, shapes and dtypes that the state was made for; it is
        static and has no arrays.
      settings: selector, allreduce and axis that the state was made for, in words; it
        is static too.
    """

    count: jax.Array
    skipped: jax.Array
    dropped: jax.Array
    clipped: jax.Array
    residual: jax.Array
    velocity: Any
    dense_velocity: Any
    selector: Any
    allreduce: Any
    info: StepInfo
    layout: _buffer.Layout
    settings: _settings.Settings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardState:
    """The state of the allreduce between nodes, one for each shard of the buffer.

    Attributes:
      state: its arrays have a leading axis, of size 1 inside the mapped function and
        outside of size w, the workers of a node, sharded over ``inner_axis``. They are
        the same on every node.
      inner_axis: static, the mesh axis of the workers of a node.
    """

    state: Any
    inner_axis: AxisName = dataclasses.field(metadata={"static": True})


def with_lead(tree: Any) -> Any:
    """A leading axis of 1 on every array."""
    return jax.tree.map(lambda x: x[None], tree)


def without_lead(tree: Any) -> Any:
    """The inverse of :func:`with_lead`."""
    return jax.tree.map(lambda x: x[0], tree)


def no_info() -> StepInfo:
    """The info before the first step, without leading axes."""
    # One array for each field: two that are donated can't be the same.
    integers = ("selected", "delivered", "overflow", "arrived")
    return StepInfo(
        **{
            name: jnp.zeros((), jnp.int32 if name in integers else jnp.float32)
            for name in StepInfo._fields
        }
    )


def per_worker(info: StepInfo, function: Any) -> StepInfo:
    """``function`` of the fields that differ between the workers."""
    return info._replace(**{name: function(getattr(info, name)) for name in PER_WORKER})
