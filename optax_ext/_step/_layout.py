"""Between a pytree of gradients and the flat buffers: the one that is sparsified, and the rest."""

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sparse_collectives import _validation

# For each dimension of a leaf the axes that split it, the major one first.
Dims = tuple[tuple[Hashable, ...], ...]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How the leaves of a tree are sharded over the axes that are not those of the workers.

    Where a device holds all of them it has no axes.

    Attributes:
      axes: their names, in the order of the mesh.
      sizes: devices along each of them.
      dims: of each leaf.
    """

    axes: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    dims: tuple[Dims, ...]

    @property
    def devices(self) -> int:
        """m, devices of a worker."""
        return math.prod(self.sizes)

    def size(self, axes: Sequence[Hashable]) -> int:
        """Devices along all of ``axes``."""
        return math.prod(self.sizes[self.axes.index(name)] for name in axes)

    def free(self, leaf: int) -> tuple[Hashable, ...]:
        """The axes along which all devices hold the same of a leaf."""
        used = {name for names in self.dims[leaf] for name in names}
        return tuple(name for name in self.axes if name not in used)

    def spec(self, leaf: int) -> PartitionSpec:
        """Of a leaf, over these axes alone."""
        return PartitionSpec(*(names or None for names in self.dims[leaf]))

    def shard_shape(self, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What one device holds of a leaf of this shape."""
        return tuple(
            length // self.size(names) for length, names in zip(shape, self.dims[leaf], strict=True)
        )

    def part_shape(self, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What one device exchanges of a leaf of this shape: rows of its shard, or a run."""
        shard, holders = self.shard_shape(leaf, shape), self.size(self.free(leaf))
        if holders == 1:
            return shard
        if shard and shard[0] % holders == 0:
            return (shard[0] // holders, *shard[1:])
        return (-(-math.prod(shard) // holders),)


def unsharded(shapes: Sequence[tuple[int, ...]]) -> Sharding:
    """Of leaves that a device holds whole."""
    return Sharding((), (), tuple(((),) * len(shape) for shape in shapes))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """Where each leaf of a pytree lies in the flat buffers.

    A pytree without leaves: all of it is static.

    Attributes:
      treedef: the tree.
      shapes: the shape of each leaf.
      dtypes: the dtype of each leaf.
      dense: whether each leaf is exchanged densely, and not in the sparse buffer.
      sharding: how other axes of the mesh shard the leaves.
      device_axes: the axes over whose devices these leaves are dealt out, where they are the part
        of one of them.
      of_placeholder: whether it is that of what ``optax.tree.map_params`` calls ``init`` with, and
        so equal to that of any parameters.
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
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Of a thousand leaves, and asked for at each call of a step.
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (
            *(self.treedef, self.shapes, self.dtypes),
            *(self.dense, self.sharding, self.device_axes),
        )

    @property
    def size(self) -> int:
        """n, entries of the buffer that is sparsified."""
        return sum(math.prod(shape) for shape in self.sparse_shapes)

    @property
    def dense_size(self) -> int:
        """Entries of the leaves that are exchanged densely."""
        return sum(math.prod(shape) for shape in self.shapes) - self.size

    @property
    def sparse_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the leaves in the buffer that is sparsified."""
        return tuple(
            shape for shape, dense in zip(self.shapes, self.dense, strict=True) if not dense
        )


def is_placeholder(tree: Any) -> bool:
    """Whether it stands for any parameters, as what ``optax.tree.map_params`` gives to ``init``.

    A node of a type of its own, without leaves.
    """
    return not isinstance(tree, dict | list | tuple | type(None)) and not jax.tree.leaves(tree)


def layout_of(tree: Any, name: str, dense: tuple[bool, ...] | None = None) -> TreeLayout:
    """The layout of ``tree``; ``dense`` says which leaves are, none by default.

    A ``dense`` of another number of leaves is that of another tree, and not used.

    Raises:
      TypeError: a leaf that is not float32, bfloat16 or float16, named by its
        path.
      ValueError: 2**31 entries or more.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        _validation.check_float(f"{name}{jax.tree_util.keystr(path)}", jnp.result_type(leaf))
    shapes = tuple(tuple(jnp.shape(leaf)) for _, leaf in leaves)
    dtypes = tuple(jnp.dtype(jnp.result_type(leaf)) for _, leaf in leaves)
    if dense is None or len(dense) != len(shapes):
        dense = (False,) * len(shapes)
    layout = TreeLayout(treedef, shapes, dtypes, dense, unsharded(shapes))
    if layout.size:
        _validation.check_size(layout.size)
    return layout


def ravel(tree: Any, layout: TreeLayout) -> tuple[jax.Array, jax.Array]:
    """The sparse leaves as one ``f32[n]``, and the dense ones as another.

    A single leaf costs no copy.
    """
    leaves = jax.tree.leaves(tree)

    def joined(dense: bool) -> jax.Array:
        chosen = [
            jnp.ravel(leaf).astype(jnp.float32)
            for leaf, is_dense in zip(leaves, layout.dense, strict=True)
            if is_dense == dense
        ]
        if not chosen:
            return jnp.zeros((0,), jnp.float32)
        return chosen[0] if len(chosen) == 1 else jnp.concatenate(chosen)

    return joined(False), joined(True)


def unravel(flat: jax.Array, dense: jax.Array, layout: TreeLayout, *, saturate: bool) -> Any:
    """The inverse of :func:`ravel`, in the dtypes of the layout.

    With ``saturate``, what is finite stays so in a narrower dtype.
    """
    leaves, offsets = [], {False: 0, True: 0}
    for shape, dtype, is_dense in zip(layout.shapes, layout.dtypes, layout.dense, strict=True):
        size, offset = math.prod(shape), offsets[is_dense]
        part = (dense if is_dense else flat)[offset : offset + size]
        leaves.append(narrowed(part, dtype, saturate=saturate).reshape(shape))
        offsets[is_dense] += size
    return jax.tree.unflatten(layout.treedef, leaves)


def narrowed(x: jax.Array, dtype: Any, *, saturate: bool) -> jax.Array:
    """``x`` in ``dtype``; with ``saturate``, the largest finite number stands for larger ones."""
    if x.dtype == dtype:
        return x
    if saturate:
        most = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x)
    return x.astype(dtype)


def dtype_runs(layout: TreeLayout) -> list[tuple[int, Any]]:
    """``(stop, dtype)`` of each run of leaves of one dtype, in the order of the sparse buffer."""
    runs: list[tuple[int, Any]] = []
    offset = 0
    for shape, dtype, is_dense in zip(layout.shapes, layout.dtypes, layout.dense, strict=True):
        if is_dense or not math.prod(shape):
            continue
        offset += math.prod(shape)
        if runs and runs[-1][1] == dtype:
            runs.pop()
        runs.append((offset, dtype))
    return runs
