"""The leaves of a tree, and the part of them that each device exchanges.

A worker may have several devices, if tensor parallelism or FSDP shards its parameters over other
axes of the mesh. Each device then selects and exchanges its own part, with the devices at the same
position in the other workers. Its part of a sharded leaf is its shard. A leaf that all devices of a
worker replicate is divided among them, and the results are gathered, so that it is the same on all
of them to the bit.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sparse_collectives import AxisName, _axes, _validation, _varying, transport

# The axes that split each dimension of a leaf, the major one first.
Dims = tuple[tuple[Hashable, ...], ...]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How the leaves of a tree are sharded over the axes besides the axes of the workers.

    There are no axes if a device holds whole leaves.

    Attributes:
      axes: the names of the axes, in the order of the mesh.
      sizes: the number of devices along each axis.
      dims: the axes of each dimension, for each leaf.
    """

    axes: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    dims: tuple[Dims, ...]

    @property
    def devices(self) -> int:
        """m, the number of devices of a worker."""
        return math.prod(self.sizes)

    def size(self, axes: Sequence[Hashable]) -> int:
        """The number of devices along all of ``axes``."""
        return math.prod(self.sizes[self.axes.index(name)] for name in axes)

    def free(self, leaf: int) -> tuple[Hashable, ...]:
        """The axes along which all devices replicate a leaf."""
        used = {name for names in self.dims[leaf] for name in names}
        return tuple(name for name in self.axes if name not in used)

    def spec(self, leaf: int) -> PartitionSpec:
        """The PartitionSpec of a leaf over these axes only."""
        return PartitionSpec(*(names or None for names in self.dims[leaf]))

    def shard_shape(self, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the shard that one device holds of a leaf of this shape."""
        return tuple(
            length // self.size(names) for length, names in zip(shape, self.dims[leaf], strict=True)
        )

    def part_shape(self, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part that one device exchanges: rows of its shard, or a flat run."""
        shard, holders = self.shard_shape(leaf, shape), self.size(self.free(leaf))
        if holders == 1:
            return shard
        if shard and shard[0] % holders == 0:
            return (shard[0] // holders, *shard[1:])
        return (-(-math.prod(shard) // holders),)


def unsharded(shapes: Sequence[tuple[int, ...]]) -> Sharding:
    """The sharding of leaves that a device holds whole."""
    return Sharding((), (), tuple([((),) * len(shape) for shape in shapes]))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """The position of each leaf of a pytree in the flat buffers.

    A static pytree without leaves.

    Attributes:
      treedef: the tree.
      shapes: the shape of each leaf.
      dtypes: the dtype of each leaf.
      dense: whether each leaf is exchanged densely instead of in the sparse buffer.
      sharding: how other axes of the mesh shard the leaves.
      device_axes: if the leaves are the part of one device, the axes over whose devices the
        parameters are divided; otherwise empty.
      of_placeholder: whether it is the layout of the placeholder for which
        ``optax.tree.map_params`` calls ``init``, which compares equal to any layout.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    dense: tuple[bool, ...]
    sharding: Sharding
    device_axes: tuple[Hashable, ...] = ()
    of_placeholder: bool = False

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, TreeLayout):
            return NotImplemented
        if self.of_placeholder or other.of_placeholder:
            return True
        return self._key == other._key

    def __hash__(self) -> int:
        if self.of_placeholder:
            # It is equal to layouts with other hashes. Without one, no cache can mix them up.
            raise TypeError("the layout of a placeholder has no hash.")
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Cached: there may be a thousand leaves, and each call of a step asks for it.
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (
            *(self.treedef, self.shapes, self.dtypes),
            *(self.dense, self.sharding, self.device_axes),
        )

    @functools.cached_property
    def size(self) -> int:
        """n, the number of entries of the sparse buffer."""
        return sum(map(math.prod, self.sparse_shapes))

    @functools.cached_property
    def dense_size(self) -> int:
        """The number of entries of the dense leaves."""
        return sum(map(math.prod, self.shapes)) - self.size

    @functools.cached_property
    def sparse_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the leaves in the sparse buffer."""
        return tuple(itertools.compress(self.shapes, map(operator.not_, self.dense)))


def is_placeholder(tree: Any) -> bool:
    """Whether it is the placeholder that ``optax.tree.map_params`` passes to ``init``.

    The placeholder is a custom node without leaves.
    """
    return not isinstance(tree, dict | list | tuple | type(None)) and not jax.tree.leaves(tree)


_FLOATS = {jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}


def _dtype(leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    # A key of jax.random has a dtype that NumPy does not know.
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.dtype(dtype)


def check_floats(tree: Any, name: str) -> None:
    """Checks that all leaves are float32, bfloat16 or float16."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        _validation.check_float(f"{name}{jax.tree_util.keystr(path)}", _dtype(leaf))


def layout_of(tree: Any, name: str, dense: tuple[bool, ...] | None = None) -> TreeLayout:
    """The layout of ``tree``; ``dense`` says which leaves are dense, none by default.

    A ``dense`` for another number of leaves belongs to another tree and is ignored.

    Raises:
      TypeError: a leaf that is not float32, bfloat16 or float16, named by its
        path.
      ValueError: 2**31 entries or more.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes, dtypes = tuple(map(jnp.shape, leaves)), tuple(map(_dtype, leaves))
    if not {*dtypes} <= _FLOATS:
        check_floats(tree, name)
    if dense is None or len(dense) != len(shapes):
        dense = (False,) * len(shapes)
    layout = TreeLayout(treedef, shapes, dtypes, dense, unsharded(shapes))
    if layout.size:
        _validation.check_size(layout.size)
    return layout


def device_layout(layout: TreeLayout) -> TreeLayout:
    """The layout of the part of the leaves of ``layout`` that one device exchanges."""
    sharding = layout.sharding
    if not sharding.axes:
        return layout
    shapes = tuple(sharding.part_shape(i, shape) for i, shape in enumerate(layout.shapes))
    whole = unsharded(shapes)
    return dataclasses.replace(layout, shapes=shapes, sharding=whole, device_axes=sharding.axes)


def take(tree: Any, layout: TreeLayout) -> Any:
    """The part that this device exchanges of a tree of its shards, without communication."""
    sharding = layout.sharding
    if not sharding.axes:
        return tree

    def part(leaf: int, shard: jax.Array) -> jax.Array:
        free = sharding.free(leaf)
        holders = sharding.size(free)
        shape = sharding.part_shape(leaf, layout.shapes[leaf])
        if holders == 1:
            return shard
        shard = _varying.to_varying(shard, free)
        if (holders * shape[0], *shape[1:]) != shard.shape:
            shard = jnp.ravel(shard)
            shard = jnp.pad(shard, (0, holders * shape[0] - shard.size))
        here = transport.axis_index(free) * shape[0]
        return lax.dynamic_slice_in_dim(shard, here, shape[0])

    leaves = jax.tree.leaves(tree)
    parts = [part(i, leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(layout.treedef, parts)


def gather(tree: Any, layout: TreeLayout) -> Any:
    """The inverse of :func:`take`: replicated leaves are the same on all devices of a worker.

    Cost: one allgather for all leaves of a dtype that are replicated over the same axes.
    """
    sharding = layout.sharding
    if not sharding.axes:
        return tree
    parts = jax.tree.leaves(tree)
    shards: list[Any] = list(parts)
    together: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        # Also for a single device, since it types the result as the same on all devices.
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


def specs_of(layout: TreeLayout) -> Any:
    """The specs of the leaves over the axes of their sharding, for arguments of a region."""
    sharding, leaves = layout.sharding, [PartitionSpec()] * len(layout.shapes)
    if sharding.axes:
        leaves = [sharding.spec(i) for i in range(len(layout.shapes))]
    return jax.tree.unflatten(layout.treedef, leaves)


def on_each_device(
    function: Callable[..., Any],
    sharding: Sharding,
    axis: AxisName,
    *,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """``function`` applied to the shards of each device, for arguments that are whole or shards.

    If a mapped function has already bound the axes of the sharding, the arguments are shards and
    ``function`` is returned unchanged. If the axes are left to the compiler, ``function`` is mapped
    over them here.
    """
    if is_manual(sharding):
        return function

    def mapped(*args: Any) -> Any:
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(sharding.axes),
            check_vma=_varying.checks_varying(axis),
        )(*args)

    return mapped


def is_manual(sharding: Sharding) -> bool:
    """Whether a mapped function has bound the axes of the sharding."""
    return all(_axes.axis_is_bound(name) for name in sharding.axes)
