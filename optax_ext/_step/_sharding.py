"""Leaves that other axes of the mesh shard, and the part of them that each device exchanges.

A worker may be several devices: its parameters are sharded over other axes of the mesh than
that of the workers, by tensor parallelism or FSDP. Each device then selects from and exchanges a
part of its own, with the devices in the same place of the other workers. Of a leaf that is
sharded its part is its shard. A leaf that all devices of a worker hold is dealt out among them,
and the results are gathered, so that it is the same on all of them to the bit.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from optax_ext._step import _layout
from optax_ext._step._layout import Sharding
from sparse_collectives import AxisName, _compat, transport


def of_specs(
    axes: Sequence[Hashable],
    sizes: Sequence[int],
    leaves: Sequence[tuple[str, tuple[int, ...], PartitionSpec]],
    workers: tuple[Hashable, ...],
) -> Sharding:
    """The sharding of leaves, each given as its name, shape and PartitionSpec.

    Raises:
      ValueError: a leaf that is sharded over the axis of the workers, or not evenly.
    """
    made = Sharding(tuple(axes), tuple(sizes), ())
    dims = []
    for name, shape, spec in leaves:
        split = [_compat.axis_names(names) if names is not None else () for names in spec]
        split += [()] * (len(shape) - len(split))
        for at, (length, names) in enumerate(zip(shape, split, strict=True)):
            shared = [n for n in names if n in workers]
            if shared:
                raise ValueError(
                    f"params{name} is sharded over axis {shared[0]!r}, which is that of the "
                    f"workers: {spec}. Every worker needs all of the parameters. Shard them over "
                    "another axis of the mesh, or give the transformation another axis."
                )
            if length % made.size(names):
                raise ValueError(
                    f"params{name} has dimension {at} of {length}, which the {made.size(names)} "
                    f"devices of {names} can't share evenly. Pad it, or leave it whole."
                )
        dims.append(tuple(tuple(names) for names in split))
    return dataclasses.replace(made, dims=tuple(dims))


def device_layout(layout: _layout.TreeLayout) -> _layout.TreeLayout:
    """The layout of the part that one device exchanges of leaves of ``layout``."""
    sharding = layout.sharding
    shapes = tuple(sharding.part_shape(i, shape) for i, shape in enumerate(layout.shapes))
    whole = _layout.unsharded(shapes)
    return dataclasses.replace(layout, shapes=shapes, sharding=whole, device_axes=sharding.axes)


def take(tree: Any, layout: _layout.TreeLayout) -> Any:
    """The part of this device, of a tree of what it holds. Moves nothing."""
    sharding = layout.sharding

    def part(leaf: int, shard: jax.Array) -> jax.Array:
        free = sharding.free(leaf)
        holders = sharding.size(free)
        shape = sharding.part_shape(leaf, layout.shapes[leaf])
        if holders == 1:
            return shard
        shard = _compat.to_varying(shard, free)
        if (holders * shape[0], *shape[1:]) != shard.shape:
            shard = jnp.ravel(shard)
            shard = jnp.pad(shard, (0, holders * shape[0] - shard.size))
        here = transport.axis_index(free) * shape[0]
        return lax.dynamic_slice_in_dim(shard, here, shape[0])

    leaves = jax.tree.leaves(tree)
    parts = [part(i, leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(layout.treedef, parts)


def gather(tree: Any, layout: _layout.TreeLayout) -> Any:
    """The inverse of :func:`take`: what all devices of a worker hold is the same on them.

    Cost: one allgather for all leaves of a dtype that are replicated over the same axes.
    """
    sharding = layout.sharding
    parts = jax.tree.leaves(tree)
    shards: list[Any] = list(parts)
    together: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        # Also of one device: it types the result as the same on all.
        if sharding.free(i):
            together.setdefault((sharding.free(i), part.dtype), []).append(i)
    for (free, _), leaves in together.items():
        flat = [jnp.ravel(parts[i]) for i in leaves]
        with jax.named_scope("sharded/gather"):
            rows = transport.all_gather(jnp.concatenate(flat), free)
        offset = 0
        for i, part in zip(leaves, flat, strict=True):
            shape = sharding.shard_shape(i, layout.shapes[i])
            whole = rows[:, offset : offset + part.size].reshape(-1)
            shards[i] = whole[: math.prod(shape)].reshape(shape)
            offset += part.size
    return jax.tree.unflatten(layout.treedef, shards)


class Specs(NamedTuple):
    """PartitionSpecs over the axes of a :class:`Sharding`, for what goes into a region.

    Attributes:
      leaves: a tree, of the shards of the leaves.
      split: of what each device has for itself, along its leading dimension.
      whole: of what is the same on all devices of a worker.
    """

    leaves: Any
    split: PartitionSpec
    whole: PartitionSpec


def specs_of(layout: _layout.TreeLayout) -> Specs:
    """The specs for leaves of ``layout``."""
    sharding = layout.sharding
    leaves = [sharding.spec(i) for i in range(len(layout.shapes))]
    return Specs(
        jax.tree.unflatten(layout.treedef, leaves),
        PartitionSpec(sharding.axes),
        PartitionSpec(),
    )


def on_each_device(
    function: Callable[..., Any],
    sharding: Sharding,
    axis: AxisName,
    *,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """``function`` of the shards that a device holds, called with whole arrays or with shards.

    Where a mapped function has bound the axes of the sharding already, arguments are shards and
    ``function`` is called as it is. Where they are left to the compiler it is mapped over
    them here.
    """
    if is_manual(sharding):
        return function

    def mapped(*args: Any) -> Any:
        # From outside: jax 0.10 can't lower an axis_index in the inner of two regions.
        names = (*_compat.axis_names(axis), *sharding.axes)
        workers = {name: lax.axis_index(name) for name in _compat.axis_names(axis)}
        parts = {
            name: jnp.arange(size, dtype=jnp.int32)
            for name, size in zip(sharding.axes, sharding.sizes, strict=True)
        }

        def inside(workers: dict, parts: dict, *args: Any) -> Any:
            places = {**workers, **{name: index[0] for name, index in parts.items()}}
            with _compat.axis_indices({name: places[name] for name in names}):
                return function(*args)

        return jax.shard_map(
            inside,
            in_specs=(
                {name: PartitionSpec() for name in workers},
                {name: PartitionSpec(name) for name in parts},
                *in_specs,
            ),
            out_specs=out_specs,
            axis_names=set(sharding.axes),
            check_vma=_compat.checks_varying(axis),
        )(workers, parts, *args)

    return mapped


def is_manual(sharding: Sharding) -> bool:
    """Whether a mapped function has bound the axes of the sharding."""
    return all(_compat.axis_is_bound(name) for name in sharding.axes)


def whole_leaves(rows: Any, layout: _layout.TreeLayout, leaf: int, start: int) -> Any:
    """A leaf from the parts of all devices.

    Args:
      rows: ``f32[m, n_part]``, of one worker, in the order of the axes.
      layout: of the leaves.
      leaf: which.
      start: where its part begins in a row.

    Returns:
      ``f32`` in the shape of the leaf; NumPy or jax as ``rows`` is.
    """
    sharding = layout.sharding
    shape = layout.shapes[leaf]
    part = sharding.part_shape(leaf, shape)
    shard = sharding.shard_shape(leaf, shape)
    free = sharding.free(leaf)
    used = [name for names in sharding.dims[leaf] for name in names]
    parts = rows[:, start : start + math.prod(part)].reshape((*sharding.sizes, -1))
    # The devices that split the leaf first, in the order of its dimensions.
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
      whole: in the shape of the leaf.
      layout: of the leaves.
      leaf: which.
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
    for i, shape in enumerate(device_layout(layout).shapes):
        if layout.dense[i] == dense:
            yield i, offset
            offset += math.prod(shape)
