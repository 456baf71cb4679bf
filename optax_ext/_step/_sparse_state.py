"""The state of error feedback: which parts belong to one worker, and what it was made for."""

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._step import _layout


class StepInfo(NamedTuple):
    """What the last step did. Zeros before the first.

    Attributes:
      selected: ``i32[1]`` for each worker: entries it selected to be sent. In a step without an
        exchange this and the others are 0, but for the threshold, which is that of the last one.
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


# The fields that differ between the workers.
PER_WORKER = ("selected", "overflow", "local_threshold", "useful", "arrived", "threshold_drift")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a :func:`sparse_allreduce`, as part of its state's tree.

    A pytree without leaves: all of it is static.

    Attributes:
      selector: the selector with its arguments, as ``topk(density=0.01)``; None of one
        that declares no ``spec``, for this and all that follow.
      allreduce: the allreduce with its arguments.
      local: the states of the transformation in front of the accumulation, ``"none"``
        without one. It decides the unit of the residual.
      residual: dtype and decay of the residual.
      correction: the momentum correction with its arguments, ``"none"`` without one.
      axis: the mesh axis of the workers; a ``Ranks`` for an MPI communicator.
      shard_axis: the axes among them over which the buffer is dealt out before anything is
        selected; none but with a hierarchical allreduce.
      decay: that of the residual.
      step_ahead: what of the residual is applied before a gradient is taken; see
        :func:`optax_ext.residual`.
      workers: P that the state was made for; 0 in a transformation, which is for any.
      whole: whether it is a whole optimizer, whose updates are those of the parameters.
      every: H, steps from one exchange to the next.
    """

    selector: str | None
    allreduce: str | None
    local: str
    residual: str
    correction: str | None
    axis: Hashable
    shard_axis: tuple[Hashable, ...]
    decay: float
    step_ahead: float
    # Rows of the arrays tell states of other numbers apart, and `optax.tree.map_params` has none.
    workers: int = dataclasses.field(default=0, compare=False)
    whole: bool = False
    every: int = 1


class SparseAllreduceState(NamedTuple):
    """State of :func:`sparse_allreduce`, and of :func:`powersgd` and :func:`acp_sgd`.

    Of parameters that other axes of the mesh shard, each of the m devices of a worker has a part
    of its own: what is said to be "for each worker" below, but for ``info`` and a ``local``
    transformation that looks at leaves, then has a row for each device, P m in all, and n is
    the size of a part.

    Fields marked "for each worker" differ between the workers: every array in
    them has a leading axis, of size 1 inside the mapped function and of size P
    outside, sharded over the axis. Those marked "for each shard" have such an axis over
    the shards of the buffer, of which there is one but with
    :func:`~sparse_collectives.allreduce.hierarchical`. The others are the same on every
    worker. :func:`optax_ext.state_specs` gives the matching PartitionSpecs.

    Attributes:
      count: ``i32[]``, steps taken, skipped ones left out.
      skipped: ``i32[]``, steps skipped because of a non-finite gradient.
      dropped: ``i32[]``, entries that were left out because they, or their sum over the
        workers, were not finite, and that no residual holds.
      withheld: ``i32[]``, entries that stayed in the residuals, wholly or in part, because
        their sum was not finite or too large for the dtype of the leaf.
      missed: ``i32[1]`` for each worker, with an exchange ``every`` so many steps: steps that it
        left out by itself because of a gradient that was not finite, or with ``nonfinite="drop"``
        entries; ``()`` with an exchange at every step.
      owner: ``i32[1]`` for each worker: the index on the axis of the worker whose residual and
        velocity these are. One that finds another's leaves them out, and has ``-1 - index``
        from then on.
      limit: ``f32[]``, the largest limit that a step had, for :func:`optax_ext.flush`; ``()``
        without a ``limit``.
      residual: ``f32[1, n]`` for each worker: what it has not delivered yet, or
        ``bf16[1, n]`` with ``residual(jnp.bfloat16)``. Leaves that go dense have none. With
        :func:`~sparse_collectives.allreduce.hierarchical` it is that of its shard,
        ``f32[1, ceil(n / w)]`` for w workers in a node.
      velocity: as ``residual``, for each worker: the momentum of its gradients; ``()``
        without a ``correction``.
      dense_velocity: ``f32[1, m]``, for each worker: the same for the leaves that go
        dense; ``()`` without these or a ``correction``.
      local: the state of the transformation in front of the accumulation, for each worker;
        ``()`` without one.
      selector: the selector's state, for each worker; ``()`` without one.
      allreduce: the allreduce's state, for each shard; the :class:`Factors` of a low-rank
        exchange.
      info: :class:`StepInfo` of the last step.
      layout: the tree, shapes and dtypes that the state was made for; it is
        static and has no arrays.
      settings: selector, allreduce and axis that the state was made for, as text; it
        is static too.
    """

    count: jax.Array
    skipped: jax.Array
    dropped: jax.Array
    withheld: jax.Array
    missed: Any
    owner: jax.Array
    limit: Any
    residual: jax.Array
    velocity: Any
    dense_velocity: Any
    local: Any
    selector: Any
    allreduce: Any
    info: StepInfo
    layout: _layout.TreeLayout
    settings: Settings

    @property
    def workers(self) -> int:
        """P outside of the mapped function, and 1 inside."""
        return max(1, self.residual.shape[0] // self.devices)

    @property
    def devices(self) -> int:
        """m, devices of a worker that have parts of their own; 1 of parameters that are whole."""
        return self.layout.sharding.devices


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


def joined(common: StepInfo, local: StepInfo) -> StepInfo:
    """``common`` with the per-worker fields of ``local``."""
    return common._replace(**{name: getattr(local, name) for name in PER_WORKER})


def per_worker(info: StepInfo, function: Any) -> StepInfo:
    """``function`` of the fields that differ between the workers."""
    return info._replace(**{name: function(getattr(info, name)) for name in PER_WORKER})


def strongly_typed(opt_state: Any) -> Any:
    """The state without weak types, as ``optax.contrib.reduce_on_plateau`` makes one at first.

    A weak type that a step makes a strong one would be another program for the second step.
    """
    return jax.tree.map(
        lambda x: lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x,
        opt_state,
    )
