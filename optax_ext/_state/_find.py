"""Finding, making and placing the state of :func:`sparse_allreduce` in a chain."""

from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from optax_ext._state import _wrappers
from optax_ext._step import _sparse_state
from optax_ext._step._sparse_state import ShardState, SparseAllreduceState, StepInfo
from sparse_collectives import _compat
from sparse_collectives._types import AxisName


def _is_state(node: Any) -> bool:
    return isinstance(node, SparseAllreduceState)


def get_states(opt_state: Any) -> list[SparseAllreduceState]:
    """Every :class:`SparseAllreduceState` in ``opt_state``: one for each bucket or group."""
    return list(filter(_is_state, jax.tree.leaves(opt_state, is_leaf=_is_state)))


def get_state(opt_state: Any) -> SparseAllreduceState | None:
    """The first :class:`SparseAllreduceState` anywhere in ``opt_state``, or None."""
    return next(iter(get_states(opt_state)), None)


def get_info(opt_state: Any) -> StepInfo | None:
    """What the last step did, from anywhere in a chain; None without a sparse one.

    Of several states (buckets, groups of parameters) counts and words are added up;
    thresholds and xi are those of the largest buffer. Outside of the mapped function the
    per-worker fields have a leading axis of P.
    """
    states = get_states(opt_state)
    if len(states) < 2:
        return states[0].info if states else None
    largest = max(states, key=lambda state: state.layout.size).info
    added = ("selected", "delivered", "overflow", "words", "useful", "arrived")
    return largest._replace(
        **{name: sum(getattr(state.info, name) for state in states) for name in added}
    )


def state_specs(opt_state: Any, axis: AxisName) -> Any:
    """The PartitionSpec of each leaf of an optimizer state, as a pytree.

    For ``in_specs`` and ``out_specs`` of ``jax.shard_map``: what belongs to one
    worker is split over ``axis`` along its leading dimension, what belongs to one
    shard (with a hierarchical allreduce) over its inner axis, and all else is
    replicated. The gradients that ``optax.MultiSteps`` accumulates in front of an
    allreduce belong to one worker too: outside of the mapped function those of all
    workers lie one behind the other.

    Args:
      opt_state: the state, or anything of its structure (as from
        ``jax.eval_shape``).
      axis: the mesh axis (or a tuple of them) given to the transformation.

    Raises:
      ValueError: ``axis`` is an MPI communicator; a wrapper around the allreduce that
        decides by the gradients of one worker (``optax.apply_if_finite``);
        ``optax.MultiSteps`` with a scalar parameter, or whose state was made outside of
        the mapped function.
    """
    _check_mesh_axis(axis)
    split, whole = PartitionSpec(axis), PartitionSpec()

    def specs(node):
        if isinstance(node, _wrappers.PerWorker):
            return jax.tree.map(lambda _: split, node.tree)
        if not _is_state(node):
            return whole
        everywhere = jax.tree.map(lambda _: whole, node)
        if isinstance(node.allreduce, ShardState):
            shard = PartitionSpec(node.allreduce.inner_axis)
            everywhere = everywhere._replace(
                allreduce=jax.tree.map(lambda _: shard, node.allreduce)
            )
        return everywhere._replace(
            residual=split,
            velocity=jax.tree.map(lambda _: split, node.velocity),
            dense_velocity=jax.tree.map(lambda _: split, node.dense_velocity),
            selector=jax.tree.map(lambda _: split, node.selector),
            info=_sparse_state.per_worker(everywhere.info, lambda _: split),
        )

    return jax.tree.map(specs, _wrappers.mark(opt_state), is_leaf=_is_state)


def init_state(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh | AbstractMesh, axis: AxisName
) -> Any:
    """``tx.init(params)`` on a mesh, each worker's part on its own device.

    Args:
      tx: a transformation with :func:`sparse_allreduce` anywhere in it.
      params: the parameters, replicated.
      mesh: the mesh; an ``AbstractMesh`` only under ``jax.eval_shape``.
      axis: the mesh axis (or a tuple of them) given to the transformation.

    Returns:
      The optimizer state, sharded as :func:`state_specs` says.

    Raises:
      ValueError: the mesh has no such axis; see :func:`state_specs`.
    """
    check_axis(mesh, axis)
    structure, names = tx.init, _compat.axis_names(axis)
    for name in reversed(names):
        structure = jax.vmap(structure, in_axes=None, axis_name=name, axis_size=mesh.shape[name])
    local = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[len(names) :], x.dtype),
        jax.eval_shape(structure, params),
    )
    specs = state_specs(local, axis)
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    return jax.jit(init)(params)


def check_axis(mesh: Mesh | AbstractMesh, axis: AxisName) -> None:
    """Every name of ``axis`` is an axis of ``mesh``."""
    _check_mesh_axis(axis)
    missing = [name for name in _compat.axis_names(axis) if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"axis={axis!r} is not an axis of the mesh, whose axes are {mesh.axis_names}. Make the "
            f"mesh with jax.make_mesh(({jax.device_count()},), ({missing[0]!r},)), or name one of "
            "its axes."
        )


def _check_mesh_axis(axis: AxisName) -> None:
    if _compat.is_communicator(axis):
        raise ValueError(
            "axis is an MPI communicator, and this is for the axes of a mesh. Over MPI each "
            "process is one worker with its own part of the state: call opt_state = "
            "tx.init(params), and write the step without jax.shard_map,\n"
            "    @jax.jit\n"
            "    def step(params, opt_state, batch):\n"
            "        gradients = jax.grad(loss_fn)(params, batch)\n"
            "        updates, opt_state = tx.update(gradients, opt_state, params)\n"
            "        return optax.apply_updates(params, updates), opt_state"
        )
