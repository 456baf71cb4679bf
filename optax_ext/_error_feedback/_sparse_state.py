"""The state of error feedback: its fields, and the settings that it was made for."""

import dataclasses
from collections.abc import Hashable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback import _layout, _roles
from optax_ext._error_feedback._roles import (
    EXCHANGE,
    GROUP,
    LOAD,
    OF_ALL,
    OF_DENSE,
    OF_SHARD,
    OF_WORKER,
    PERIODIC,
    SHARED,
    STATISTIC,
    SUMMED,
    Rows,
)
from sparse_collectives import AxisName, _varying


@_roles.declared
class StepInfo(NamedTuple):
    """Counts of the last step; zeros before the first step.

    In a step without an exchange all fields are 0, except the thresholds, which keep their values.

    Attributes:
      selected: ``i32[1]`` for each worker: entries that it selected to send.
      delivered: ``i32[]``: entries in the update that every worker applied.
      overflow: ``i32[1]`` for each worker: capacity overflow, the entries that found no slot.
      local_threshold: ``f32[1]`` for each worker: the magnitude threshold of its selection.
      global_threshold: ``f32[]``: the magnitude threshold of the global selection.
      words: ``f32[]``: 4-byte words that each worker received in the allreduce, padding
        included.
      useful: ``f32[1]`` for each worker: words of its messages without padding. The
        mean over the workers, divided by ``words``, is the occupancy.
      arrived: ``i32[1]`` for each worker: the entries of its selection that are in
        the update. It keeps the whole value of the other entries.
      threshold_drift: ``f32[1]`` for each worker: its threshold divided by the threshold of the
        previous step, minus 1. It is about 0 in a steady state.
    """

    selected: Annotated[jax.Array, GROUP, OF_WORKER]
    delivered: Annotated[jax.Array, GROUP, OF_ALL]
    overflow: Annotated[jax.Array, GROUP, OF_WORKER]
    local_threshold: Annotated[jax.Array, GROUP, OF_WORKER]
    global_threshold: Annotated[jax.Array, GROUP, OF_ALL]
    words: Annotated[jax.Array, GROUP, OF_ALL]
    useful: Annotated[jax.Array, GROUP, OF_WORKER]
    arrived: Annotated[jax.Array, GROUP, OF_WORKER]
    threshold_drift: Annotated[jax.Array, GROUP, OF_WORKER]


# The fields that differ between the workers.
PER_WORKER = _roles.names(StepInfo, OF_WORKER)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a :func:`sparse_allreduce`, as part of its state's tree.

    A static pytree without leaves.

    Attributes:
      selector: the selector with its arguments, such as ``topk(density=0.01)``. Here and in
        the other texts None stands for a part that declares no ``spec``.
      allreduce: the allreduce with its arguments.
      local: the states of the transformation before the accumulation, ``"none"``
        without one. It decides the unit of the residual.
      residual: dtype, decay and step-ahead of the residual.
      correction: the momentum correction with its arguments, ``"none"`` without one.
      axis: the mesh axis of the workers; a ``Ranks`` for an MPI communicator.
      shard_axis: the axes among them over which the buffer is divided before the
        selection; empty except with a hierarchical allreduce.
      decay: the decay of the residual.
      step_ahead: the share of the residual that is applied before a gradient is taken; see
        :func:`optax_ext.residual`.
      workers: P that the state was made for; 0 in a transformation, which is for any P.
      whole: whether it is a complete optimizer, which returns updates of the parameters.
      every: H, the steps from one exchange to the next.
      by_leaf: whether the local transformation sees whole leaves, so that its state belongs to a
        worker and not to a device.
      phase: the part of a round that is traced; see :mod:`._phases`. None: a whole step.
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
    # Not compared: rows of arrays distinguish numbers of workers, and map_params has no number.
    workers: int = dataclasses.field(default=0, compare=False)
    whole: bool = False
    every: int = 1
    by_leaf: bool = False
    phase: str | None = None


@_roles.declared
class SparseAllreduceState(NamedTuple):
    """State of :func:`sparse_allreduce`, and of :func:`powersgd` and :func:`acp_sgd`.

    Fields marked "for each worker" differ between the workers: every array in
    them has a leading axis, of size 1 inside the mapped function and of size P
    outside, sharded over the axis. Fields marked "for each shard" have such an axis over
    the shards of the buffer; there is one shard except with
    :func:`~sparse_collectives.allreduce.hierarchical`. The other fields are the same on every
    worker. :func:`optax_ext.state_specs` gives the matching PartitionSpecs.

    If other axes of the mesh shard the parameters, each of the m devices of a worker has its
    own part. Fields "for each worker" then have a row for each device, P m in all, and n is the
    size of a part. The exceptions are ``info``, and ``local`` for a transformation of leaves.

    Attributes:
      count: ``i32[]``, steps taken, without skipped steps.
      skipped: ``i32[]``, steps skipped because of a non-finite gradient.
      dropped: ``i32[]``, entries that were left out because they, or their sum over the
        workers, were not finite, or are too large for a dense leaf. No residual keeps them.
      withheld: ``i32[]``, entries that stayed in the residuals, wholly or in part, because
        their sum was not finite or too large for the dtype of the leaf.
      missed: ``i32[1]`` for each worker, with ``every`` above 1: steps that it left out alone
        because its gradient was not finite, or entries with ``nonfinite="drop"``; ``()`` with an
        exchange at every step.
      owner: ``i32[1]`` for each worker: the index on the axis of the worker to which this residual
        and velocity belong. A worker that finds another worker's leaves them out, and has
        ``-1 - index`` from then on.
      residual: ``f32[1, n]`` for each worker, or ``bf16[1, n]`` with
        ``residual(jnp.bfloat16)``: its unsent entries. Dense leaves have none. With
        :func:`~sparse_collectives.allreduce.hierarchical` it is the residual of its shard,
        ``f32[1, ceil(n / w)]`` for w workers in a node. Without entries it has one column, which
        stays 0, since orbax saves no empty array.
      velocity: for each worker, in the shape of ``residual``: the momentum of its gradients;
        ``()`` without entries or without a ``correction``.
      dense_velocity: ``f32[1, m]``, for each worker: the same for the dense leaves, with m
        entries; ``()`` without dense leaves or without a ``correction``.
      local: the state of the transformation before the accumulation, for each worker;
        ``()`` without one.
      selector: the selector's state, for each worker; ``()`` without one.
      allreduce: the allreduce's state, for each shard; the :class:`Factors` of a low-rank
        exchange; while the last step of a round is traced, the :class:`._phases.Arrived`.
      info: :class:`StepInfo` of the last step.
      layout: the tree, shapes and dtypes that the state was made for; static, without
        arrays.
      settings: the selector, allreduce and axis that the state was made for, as text;
        static.
    """

    count: Annotated[jax.Array, SHARED]
    skipped: Annotated[jax.Array, SHARED]
    dropped: Annotated[jax.Array, SHARED, EXCHANGE]
    withheld: Annotated[jax.Array, SHARED, EXCHANGE]
    missed: Annotated[Any, SUMMED, OF_WORKER]
    owner: Annotated[jax.Array, GROUP, OF_WORKER]
    residual: Annotated[jax.Array, SUMMED]
    velocity: Annotated[Any, SUMMED, LOAD]
    dense_velocity: Annotated[Any, SUMMED, OF_DENSE, LOAD]
    local: Annotated[Any, STATISTIC, LOAD]
    selector: Annotated[Any, PERIODIC, EXCHANGE]
    allreduce: Annotated[Any, PERIODIC, OF_SHARD, EXCHANGE]
    info: Annotated[StepInfo, GROUP, OF_ALL, EXCHANGE]
    layout: Annotated[_layout.TreeLayout, "static"]
    settings: Annotated[Settings, "static"]

    @property
    def workers(self) -> int:
        """P outside the mapped function, and 1 inside."""
        return max(1, self.residual.shape[0] // self.devices)

    @property
    def devices(self) -> int:
        """m, devices of a worker with parts of their own; 1 if the parameters are not sharded."""
        return self.layout.sharding.devices


def with_lead(tree: Any) -> Any:
    """A leading axis of 1 on every array."""
    return jax.tree.map(lambda x: x[None], tree)


def without_lead(tree: Any) -> Any:
    """The inverse of :func:`with_lead`."""
    return jax.tree.map(lambda x: x[0], tree)


def as_rows(
    fields: dict[str, Any], axis: AxisName, device_axes: tuple[Hashable, ...]
) -> dict[str, Any]:
    """The fields of one device, as the state has them: its rows, typed by whom they differ among.

    Args:
      fields: the value of each field with arrays, by name, without a leading axis.
      axis: the axis of the workers.
      device_axes: the axes of the devices of a worker.
    """

    def of(rows: Rows, value: Any) -> Any:
        if rows is Rows.NONE:
            return value
        value = with_lead(value)
        if rows is not Rows.SHARD:
            value = _varying.to_varying(value, axis)
        return value if rows is Rows.WORKER else _varying.to_varying(value, device_axes)

    declared = _roles.FIELDS[SparseAllreduceState]
    return {name: of(declared[name].rows, value) for name, value in fields.items()}


def no_info() -> StepInfo:
    """The info before the first step, without leading axes."""
    # One array for each field, since two donated arguments cannot be the same array.
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
    """``info`` with ``function`` applied to the fields that differ between the workers."""
    return info._replace(**{name: function(getattr(info, name)) for name in PER_WORKER})


def strongly_typed(opt_state: Any) -> Any:
    """The state without weak types, which ``optax.contrib.reduce_on_plateau`` has at init.

    A step returns strong types, so a weak type would make JAX compile the second step again.
    """
    return jax.tree.map(
        lambda x: lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x,
        opt_state,
    )
