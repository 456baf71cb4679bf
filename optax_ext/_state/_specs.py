"""The PartitionSpec of each leaf of an optimizer state."""

from collections.abc import Collection, Hashable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext._error_feedback._roles import Rows
from optax_ext._state import _host_checks, _index
from sparse_collectives import AxisName, _axes


def state_specs(opt_state: Any, *, manual: AxisName | None = None) -> Any:
    """The PartitionSpec of each leaf of an optimizer state, as a pytree.

    Use it for ``in_specs`` and ``out_specs`` of ``jax.shard_map``. Values of one worker are
    split over the axis of the transformation along their leading dimension, and values of one
    shard (with a hierarchical allreduce) over its inner axis; all else is replicated. The
    gradients that ``optax.MultiSteps`` accumulates before an allreduce also belong to one
    worker: outside of the mapped function the gradients of all workers are concatenated.

    If other axes shard the parameters, values of one device are also split over these axes. The
    rest of the optimizer state keeps its placement, which arrays (and the results of
    :func:`abstract_state`) carry themselves.

    Args:
      opt_state: the state, or anything of its structure (such as the result of
        ``jax.eval_shape``).
      manual: the axes that the mapped function makes manual, its ``axis_names``: the specs name
        no others. None: all axes of the mesh.

    Raises:
      ValueError: an axis that is an MPI communicator.
      ValueError: allreduces that name different axes.
      ValueError: a wrapper around the allreduce that decides by the gradients of one worker
        (``optax.apply_if_finite``).
      ValueError: ``optax.MultiSteps`` with a scalar parameter, or with a state that was made
        outside of the mapped function.
    """
    return on_axes(_all_specs(opt_state), manual)


def on_axes(specs: Any, manual: AxisName | None) -> Any:
    """The specs restricted to the axes ``manual``; unchanged if that is None."""
    if manual is None:
        return specs
    names = _axes.axis_names(manual)
    return jax.tree.map(lambda spec: restricted(spec, names), specs)


def _all_specs(opt_state: Any) -> Any:
    leaves, treedef = jax.tree.flatten(opt_state)
    index = _index.index_of(treedef)
    index.check(opt_state)
    if not index.axes:
        return treedef.unflatten(map(_placed_spec, leaves))
    _host_checks.check_mesh_axis(index.axis)
    if not index.is_parted:
        return treedef.unflatten(index.specs)

    def spec(known: _index.Leaf, leaf: Any) -> PartitionSpec:
        if known.rows is Rows.NONE:
            return _placed_spec(leaf)
        if known.rows in (Rows.WORKER, Rows.JOINED) and len(own := _placed_spec(leaf)):
            return own
        return known.spec

    return treedef.unflatten(map(spec, index.leaves, leaves))


def restricted(spec: PartitionSpec, names: Collection[Hashable]) -> PartitionSpec:
    """``spec`` without any other names."""
    kept = [
        tuple(name for name in _axes.axis_names(dim) if name in names) if dim is not None else ()
        for dim in spec
    ]
    while kept and not kept[-1]:
        kept.pop()
    return PartitionSpec(*((dim[0] if len(dim) == 1 else dim) if dim else None for dim in kept))


def _placed_spec(leaf: Any) -> PartitionSpec:
    """The spec of an array, from its own sharding."""
    placed = getattr(leaf, "sharding", None)
    if not isinstance(placed, NamedSharding) or isinstance(leaf, Tracer):
        return PartitionSpec()
    return restricted(placed.spec, placed.mesh.axis_names)
