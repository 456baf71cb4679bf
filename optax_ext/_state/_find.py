"""Finding the states of allreduces in an optimizer state: their infos, axis and PartitionSpecs."""

import functools
from collections.abc import Collection, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext._state import _wrappers
from optax_ext._step import _sparse_state
from optax_ext._step._dense import DenseState
from optax_ext._step._sparse_state import SparseAllreduceState, StepInfo
from sparse_collectives import AxisName, _compat


def is_state(node: Any) -> bool:
    """Whether it is the state of a :func:`sparse_allreduce`."""
    return isinstance(node, SparseAllreduceState)


def get_states(opt_state: Any) -> list[SparseAllreduceState]:
    """Every :class:`SparseAllreduceState` in ``opt_state``: one for each bucket or group."""
    return list(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def get_state(opt_state: Any) -> SparseAllreduceState | None:
    """The first :class:`SparseAllreduceState` anywhere in ``opt_state``, or None."""
    return next(iter(get_states(opt_state)), None)


def get_info(opt_state: Any) -> StepInfo | None:
    """What the last step did, from anywhere in a chain; None without an allreduce.

    Of several states (buckets, groups of parameters) counts and words are added up;
    thresholds are those of the largest buffer. Outside of the mapped function the
    per-worker fields have a leading axis of P. With :func:`dense` all entries are selected
    and delivered; per-worker fields then have a leading axis of 1, since all are alike.
    """
    reductions = _wrappers.reductions(opt_state)
    if not reductions:
        return None
    infos = [_info_of(state) for state in reductions]
    states = get_states(opt_state)
    largest = infos[0]
    if states:
        largest = max(states, key=lambda state: state.layout.size).info
    added = ("selected", "delivered", "overflow", "words", "useful", "arrived")
    return largest._replace(**{name: sum(getattr(info, name) for info in infos) for name in added})


def _info_of(state: SparseAllreduceState | DenseState) -> StepInfo:
    if isinstance(state, SparseAllreduceState):
        return state.info
    everything = jnp.asarray(state.delivered)[None]
    info = _sparse_state.per_worker(_sparse_state.no_info(), lambda x: x[None])
    return info._replace(
        selected=everything,
        arrived=everything,
        delivered=state.delivered,
        words=state.words,
        useful=jnp.asarray(state.words)[None],
    )


def axis_of(opt_state: Any) -> Hashable:
    """The axis that the allreduces of an optimizer state were made for.

    Raises:
      ValueError: there is none, or they name different axes.
    """
    axes = _axes_of(jax.tree.structure(opt_state))
    if not axes:
        raise ValueError(
            "opt_state has no sparse allreduce, and no optax_ext.dense, in it, so nothing says "
            "over which axis gradients are averaged. "
            "Put optax_ext.ok_topk(density=..., axis='data') or "
            "optax_ext.dense(axis='data') first in the chain of tx."
        )
    if len(axes) > 1:
        names = " and ".join(map(repr, axes))
        raise ValueError(
            f"tx has allreduces over different axes, {names}: all of them average the gradients of "
            "the same workers. Give each the same axis=, a tuple where it has several names."
        )
    return axes[0]


@functools.lru_cache(maxsize=256)
def _axes_of(structure: Any) -> list[Hashable]:
    """Those that the reductions name; once for each structure, and not at each call."""
    opt_state = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    axes = (
        state.settings.axis if isinstance(state, SparseAllreduceState) else state.axis
        for state in _wrappers.reductions(opt_state)
    )
    return list(dict.fromkeys(axes))


def state_specs(opt_state: Any, *, manual: AxisName | None = None) -> Any:
    """The PartitionSpec of each leaf of an optimizer state, as a pytree.

    For ``in_specs`` and ``out_specs`` of ``jax.shard_map``: what belongs to one
    worker is split over the axis of the transformation along its leading dimension, what
    belongs to one shard (with a hierarchical allreduce) over its inner axis, and all else
    is replicated. The gradients that ``optax.MultiSteps`` accumulates in front of an
    allreduce belong to one worker too: outside of the mapped function those of all
    workers lie one behind the other.

    Of parameters that other axes shard, what belongs to one device is split over these, too;
    what the rest of the optimizer keeps is as it is placed, which arrays (and those of
    :func:`abstract_state`) say themselves.

    Args:
      opt_state: the state, or anything of its structure (as from
        ``jax.eval_shape``).
      manual: the axes that the mapped function makes manual, its ``axis_names``: the specs name
        no others. None: all axes of the mesh.

    Raises:
      ValueError: an axis that is an MPI communicator; allreduces that name different axes; a
        wrapper around the allreduce that decides by the gradients of one worker
        (``optax.apply_if_finite``); ``optax.MultiSteps`` with a scalar parameter, or whose
        state was made outside of the mapped function.
    """
    return on_axes(_all_specs(opt_state), manual)


def on_axes(specs: Any, manual: AxisName | None) -> Any:
    """The specs over the axes ``manual`` alone; None: as they are."""
    if manual is None:
        return specs
    names = _compat.axis_names(manual)
    return jax.tree.map(lambda spec: restricted(spec, names), specs, is_leaf=is_spec)


def _all_specs(opt_state: Any) -> Any:
    marked = _wrappers.mark(opt_state)
    if not _wrappers.reductions(opt_state):
        return jax.tree.map(_placed_spec, opt_state)
    axis = axis_of(opt_state)
    check_mesh_axis(axis)
    parted = any(state.layout.sharding.axes for state in get_states(opt_state))
    whole = PartitionSpec()

    def over(spec: PartitionSpec, tree: Any) -> Any:
        return jax.tree.map(lambda _: spec, tree)

    def placed(leaf: Any) -> PartitionSpec:
        return _placed_spec(leaf) if parted else whole

    def of_worker(leaf: Any) -> PartitionSpec:
        spec = placed(leaf)
        return spec if len(spec) else PartitionSpec(axis)

    def specs(node):
        if isinstance(node, _wrappers.PerWorker):
            return jax.tree.map(of_worker, node.tree)
        if not is_state(node):
            return placed(node)
        device_axes = node.layout.sharding.axes
        split = PartitionSpec((*_compat.axis_names(axis), *device_axes)) if device_axes else None
        split = PartitionSpec(axis) if split is None else split
        shards = (*node.settings.shard_axis, *device_axes)
        everywhere = over(whole, node)
        rows = node.residual.shape[0]

        def of_local(leaf: Any) -> PartitionSpec:
            return split if not device_axes or leaf.shape[0] == rows else of_worker(leaf)

        return everywhere._replace(
            owner=PartitionSpec(axis),
            residual=split,
            velocity=over(split, node.velocity),
            dense_velocity=over(split, node.dense_velocity),
            local=jax.tree.map(of_local, node.local),
            selector=over(split, node.selector),
            allreduce=over(PartitionSpec(shards) if shards else whole, node.allreduce),
            info=_sparse_state.per_worker(everywhere.info, lambda _: PartitionSpec(axis)),
        )

    return jax.tree.map(specs, marked, is_leaf=is_state)


def is_spec(node: Any) -> bool:
    """Whether it is a PartitionSpec, which is a leaf."""
    return isinstance(node, PartitionSpec)


def restricted(spec: PartitionSpec, names: Collection[Hashable]) -> PartitionSpec:
    """``spec`` without all other names."""
    kept = [
        tuple(name for name in _compat.axis_names(dim) if name in names) if dim is not None else ()
        for dim in spec
    ]
    while kept and not kept[-1]:
        kept.pop()
    return PartitionSpec(*((dim[0] if len(dim) == 1 else dim) if dim else None for dim in kept))


def _placed_spec(leaf: Any) -> PartitionSpec:
    """Where an array says that it is."""
    placed = getattr(leaf, "sharding", None)
    if not isinstance(placed, NamedSharding) or isinstance(leaf, Tracer):
        return PartitionSpec()
    return restricted(placed.spec, placed.mesh.axis_names)


def check_mesh_axis(axis: Any) -> None:
    """The axis is that of a mesh, and no MPI communicator."""
    if _compat.ranks(axis):
        raise ValueError(
            "the axis of the transformation is an MPI communicator, and this is for the axes of a "
            "mesh. Over MPI each process is one worker with its own part of the state: call "
            "opt_state = tx.init(params), and write the step without jax.shard_map,\n"
            "    @jax.jit\n"
            "    def step(params, opt_state, batch):\n"
            "        gradients = jax.grad(loss_fn)(params, batch)\n"
            "        updates, opt_state = tx.update(gradients, opt_state, params)\n"
            "        return optax.apply_updates(params, updates), opt_state"
        )
