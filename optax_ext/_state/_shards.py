"""The residuals of a state as rows of n entries, also if each row is a shard."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from optax_ext._error_feedback import _buffers, _layout, _residual
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state._residual_tree import of_vector
from sparse_collectives import _axes


def workers_in_node(node: SparseAllreduceState) -> int:
    """The workers in a node; 1 without ``hierarchical``.

    Raises:
      ValueError: nothing in the state says it.
    """
    shard_axis = node.settings.shard_axis
    if not shard_axis:
        return 1
    if of_ranks := _axes.ranks(shard_axis):
        return of_ranks
    arrays = jax.tree.leaves(node.allreduce)
    if arrays:
        return arrays[0].shape[0] // node.devices
    # An allreduce without a state does not say; a residual that is split over the workers does.
    placed = getattr(node.residual, "sharding", None)
    rows, shard = node.workers, node.residual.shape[1]
    if isinstance(placed, NamedSharding) and placed.spec:
        sizes = placed.mesh.shape
        # Axes of one worker are not in the spec.
        split = math.prod(sizes[name] for name in _axes.axis_names(placed.spec[0] or ()))
        if split == node.residual.shape[0] and set(shard_axis) <= set(sizes):
            return math.prod(sizes[name] for name in shard_axis)
    size = part_size(node)
    fitting = [
        workers
        for workers in range(1, rows + 1)
        if rows % workers == 0 and _residual.width(math.ceil(size / workers)) == shard
    ]
    if len(fitting) == 1:
        return fitting[0]
    name = shard_axis[0] if len(shard_axis) == 1 else shard_axis
    raise ValueError(
        f"state.residual has {rows} rows of {shard} for {size} entries, so a node may have any of "
        f"{fitting} workers, and an allreduce without a state does not say how many. Restore the "
        f"state on a mesh with the axis {name!r} of the old workers."
    )


def part_rows(node: SparseAllreduceState, residual: Any) -> Any:
    """The residual as ``f32[w, m, n]``: for each worker, or node, and each of its m devices.

    n is the size of a part, or of the whole buffer if parameters are whole.
    """
    parts, shard = node.devices, residual.shape[1]
    workers = residual.shape[0] // parts
    if not node.settings.shard_axis:
        return residual.reshape(workers, parts, shard)[:, :, : part_size(node)]
    inner = workers_in_node(node)
    nodes = workers // inner
    if _inner_first(node):
        split = residual.reshape(inner, nodes, parts, shard).transpose(1, 2, 0, 3)
    else:
        split = residual.reshape(nodes, inner, parts, shard).transpose(0, 2, 1, 3)
    return split.reshape(nodes, parts, inner * shard)[:, :, : part_size(node)]


def part_size(node: SparseAllreduceState) -> int:
    """Entries of a worker's buffer that one device has."""
    return _layout.device_layout(node.layout).size


def leaves_of(node: SparseAllreduceState, parts: Any) -> Any:
    """The leaves of ``f32[m, n]``, the parts of one worker; dense leaves are 0."""
    layout = node.layout
    if not layout.sharding.axes:
        return of_vector(parts[0], layout)
    leaves = [jnp.zeros(s, t) for s, t in zip(layout.shapes, layout.dtypes, strict=True)]
    for leaf, start in starts(layout):
        whole = whole_leaves(parts, layout, leaf, start)
        leaves[leaf] = _buffers.narrowed(whole, layout.dtypes[leaf], saturate=True)
    return jax.tree.unflatten(layout.treedef, leaves)


def parts_of_leaves(layout: _layout.TreeLayout, leaves: list[jax.Array]) -> jax.Array:
    """The inverse of :func:`leaves_of`: ``f32[m, n]`` from a list of all leaves."""
    if not layout.sharding.axes:
        kept = [x for x, dense in zip(leaves, layout.dense, strict=True) if not dense]
        return jnp.concatenate([x.reshape(-1) for x in kept])[None]
    places = starts(layout)
    return jnp.concatenate([parts_of_leaf(leaves[i], layout, i, jnp.pad) for i, _ in places], 1)


def rows(node: SparseAllreduceState, residual: np.ndarray) -> np.ndarray:
    """The residual as ``f32[w, n]``, a row for each worker, or node of workers."""
    return joined(part_rows(node, residual), node.layout)


def unrows(node: SparseAllreduceState, rows: np.ndarray) -> np.ndarray:
    """The inverse of :func:`rows`."""
    return of_part_rows(node, parted(rows, node.layout))


def of_part_rows(node: SparseAllreduceState, parts: Any) -> Any:
    """The inverse of :func:`part_rows`."""
    nodes, m, size = parts.shape
    inner, shard = workers_in_node(node), node.residual.shape[1]
    if inner * shard > size:
        pad = np.pad if isinstance(parts, np.ndarray) else jnp.pad
        parts = pad(parts, ((0, 0), (0, 0), (0, inner * shard - size)))
    if not node.settings.shard_axis:
        return parts.reshape(nodes * m, shard)
    split = parts.reshape(nodes, m, inner, shard)
    split = split.transpose((2, 0, 1, 3) if _inner_first(node) else (0, 2, 1, 3))
    return split.reshape(nodes * inner * m, shard)


def joined(parts: np.ndarray, layout: _layout.TreeLayout, *, dense: bool = False) -> np.ndarray:
    """``[w, m, part]`` as ``[w, n]``: the parts of each worker's devices as one buffer."""
    if not layout.sharding.axes:
        return parts[:, 0]
    places = list(starts(layout, dense=dense))
    none = np.zeros(0, parts.dtype)  # There may be no such leaves.
    whole = [
        [none, *(whole_leaves(row, layout, leaf, start).reshape(-1) for leaf, start in places)]
        for row in parts
    ]
    return np.stack([np.concatenate(row) for row in whole])


def parted(rows: np.ndarray, layout: _layout.TreeLayout, *, dense: bool = False) -> np.ndarray:
    """The inverse of :func:`joined`."""
    if not layout.sharding.axes:
        return rows[:, None]
    places = list(starts(layout, dense=dense))
    made, none = [], np.zeros((layout.sharding.devices, 0), rows.dtype)
    for row in rows:
        parts, offset = [none], 0
        for leaf, _ in places:
            size = math.prod(layout.shapes[leaf])
            whole = row[offset : offset + size].reshape(layout.shapes[leaf])
            parts.append(parts_of_leaf(whole, layout, leaf, np.pad))
            offset += size
        made.append(np.concatenate(parts, axis=1))
    return np.stack(made)


def _inner_first(node: SparseAllreduceState) -> bool:
    names = _axes.axis_names(node.settings.axis)
    inner = node.settings.shard_axis
    if names[-len(inner) :] == inner:
        return False
    if names[: len(inner)] == inner:
        return True
    raise ValueError(
        f"axis={names!r} has the names of inner_axis={inner!r} between other names or in another "
        "order. Write the axis as the names of the nodes followed by the names of inner_axis."
    )


def whole_leaves(rows: Any, layout: _layout.TreeLayout, leaf: int, start: int) -> Any:
    """A leaf from the parts of all devices.

    Args:
      rows: ``f32[m, n_part]``, the parts of one worker, in the order of the axes.
      layout: the layout of the leaves.
      leaf: the index of the leaf.
      start: the offset of its part in a row.

    Returns:
      ``f32`` in the shape of the leaf, as a NumPy or JAX array like ``rows``.
    """
    sharding = layout.sharding
    shape = layout.shapes[leaf]
    part = sharding.part_shape(leaf, shape)
    shard = sharding.shard_shape(leaf, shape)
    free = sharding.free(leaf)
    used = [name for names in sharding.dims[leaf] for name in names]
    parts = rows[:, start : start + math.prod(part)].reshape((*sharding.sizes, -1))
    # First the devices that split the leaf, in the order of its dimensions.
    order = [sharding.axes.index(name) for name in (*used, *free)]
    parts = parts.transpose((*order, parts.ndim - 1))
    count = math.prod(shard)
    shards = parts.reshape((sharding.size(used), -1))[:, :count]
    grid = [sharding.size(names) for names in sharding.dims[leaf]]
    blocks = shards.reshape((*grid, *shard))
    ndim = len(shape)
    blocks = blocks.transpose([i for d in range(ndim) for i in (d, ndim + d)])
    return blocks.reshape(shape)


def parts_of_leaf(whole: Any, layout: _layout.TreeLayout, leaf: int, pad: Callable) -> Any:
    """The inverse of :func:`whole_leaves`: ``f32[m, part]``.

    Args:
      whole: an array in the shape of the leaf.
      layout: the layout of the leaves.
      leaf: the index of the leaf.
      pad: ``numpy.pad`` or ``jax.numpy.pad``.
    """
    sharding = layout.sharding
    shape = layout.shapes[leaf]
    shard = sharding.shard_shape(leaf, shape)
    part = math.prod(sharding.part_shape(leaf, shape))
    free = sharding.free(leaf)
    used = [name for names in sharding.dims[leaf] for name in names]
    grid = [sharding.size(names) for names in sharding.dims[leaf]]
    ndim = len(shape)
    blocks = whole.reshape([n for pair in zip(grid, shard, strict=True) for n in pair])
    blocks = blocks.transpose((*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)))
    shards = blocks.reshape((sharding.size(used), -1))
    shards = pad(shards, ((0, 0), (0, part * sharding.size(free) - shards.shape[1])))
    order = [*used, *free]
    lengths = [sharding.sizes[sharding.axes.index(name)] for name in order]
    by_axis = [order.index(name) for name in sharding.axes]
    parts = shards.reshape((*lengths, part)).transpose((*by_axis, len(order)))
    return parts.reshape((sharding.devices, part))


def starts(layout: _layout.TreeLayout, *, dense: bool = False) -> Iterator[tuple[int, int]]:
    """``(leaf, start)`` of the leaves in the buffer of a part, sparse or dense."""
    offset = 0
    for i, shape in enumerate(_layout.device_layout(layout).shapes):
        if layout.dense[i] == dense:
            yield i, offset
            offset += math.prod(shape)
