"""The residuals of a state as rows of n entries, also where they are those of shards."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import extend


def workers_in_node(node: SparseAllreduceState) -> int:
    """w; 1 without ``hierarchical``.

    Raises:
      ValueError: nothing of the state says it.
    """
    shard_axis = node.settings.shard_axis
    if not shard_axis:
        return 1
    if of_ranks := extend.ranks(shard_axis):
        return of_ranks
    arrays = jax.tree.leaves(node.allreduce)
    if arrays:
        return arrays[0].shape[0]
    # An allreduce without a state does not say; a residual that is split over the workers does.
    placed = getattr(node.residual, "sharding", None)
    rows, shard = node.residual.shape
    if isinstance(placed, NamedSharding) and placed.spec:
        sizes = placed.mesh.shape
        # Axes of one worker are not in the spec.
        split = math.prod(sizes[name] for name in extend.axis_names(placed.spec[0] or ()))
        if split == rows and set(shard_axis) <= set(sizes):
            return math.prod(sizes[name] for name in shard_axis)
    size = node.layout.size
    fitting = [
        workers
        for workers in range(1, rows + 1)
        if rows % workers == 0 and extend.shard_size(size, workers) == shard
    ]
    if len(fitting) == 1:
        return fitting[0]
    name = shard_axis[0] if len(shard_axis) == 1 else shard_axis
    raise ValueError(
        f"state.residual has {rows} rows of {shard} for {size} entries, so a node may have any of "
        f"{fitting} workers, and an allreduce without a state does not say how many. Restore the "
        f"state on a mesh with the axis {name!r} of the old workers."
    )


def rows(node: SparseAllreduceState, residual: Any) -> Any:
    """The residual as ``f32[m, n]``, a row for each worker, or node of workers."""
    if not node.settings.shard_axis:
        return residual
    inner, shard = workers_in_node(node), residual.shape[1]
    if _inner_first(node):
        parts = residual.reshape(inner, -1, shard).swapaxes(0, 1)
    else:
        parts = residual.reshape(-1, inner, shard)
    return parts.reshape(-1, inner * shard)[:, : node.layout.size]


def unrows(node: SparseAllreduceState, rows: np.ndarray) -> np.ndarray:
    """The inverse of :func:`rows`."""
    if not node.settings.shard_axis:
        return rows
    inner, shard = workers_in_node(node), node.residual.shape[1]
    parts = np.pad(rows, ((0, 0), (0, inner * shard - rows.shape[1])))
    parts = parts.reshape(-1, inner, shard)
    return (parts.swapaxes(0, 1) if _inner_first(node) else parts).reshape(-1, shard)


def _inner_first(node: SparseAllreduceState) -> bool:
    names = extend.axis_names(node.settings.axis)
    inner = node.settings.shard_axis
    if names[-len(inner) :] == inner:
        return False
    if names[: len(inner)] == inner:
        return True
    raise ValueError(
        f"axis={names!r} has the names of inner_axis={inner!r} in between others or in another "
        "order. Write the axis as the nodes' names followed by those of inner_axis."
    )


def check_all_rows(name: str, node: SparseAllreduceState) -> None:
    """The state has the rows of all workers."""
    workers, rows = extend.ranks(node.settings.axis), node.residual.shape[0]
    if workers and rows != workers:
        raise ValueError(
            f"{name} was made over an MPI communicator of {workers} ranks and has the part of "
            f"{rows}; this needs the state of all workers. Gather the parts of the ranks along the "
            "leading axis of what state_specs(state, 'ranks') splits over 'ranks'; a fresh state "
            f"of all is optax_ext.init_state(tx, params, {{'ranks': {workers}}}) with axis='ranks'."
        )
