"""Between a pytree of gradients and the flat buffer that is sparsified."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from sparse_collectives import _validation


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf of a pytree lies in the flat buffer.

    A pytree without leaves: all of it is static.

    Attributes:
      treedef: the tree.
      shapes: the shape of each leaf.
      dtypes: the dtype of each leaf.
      size: n, entries of the buffer.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    size: int


def layout_of(tree: Any, name: str) -> Layout:
    """The layout of ``tree``.

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
    size = sum(math.prod(shape) for shape in shapes)
    if size:
        _validation.check_size(size)
    return Layout(treedef, shapes, dtypes, size)


def ravel(tree: Any) -> jax.Array:
    """All leaves as one ``f32[n]``. A single leaf costs no copy."""
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def unravel(flat: jax.Array, layout: Layout) -> Any:
    """The inverse of :func:`ravel`, in the dtypes of the layout."""
    leaves, offset = [], 0
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        size = math.prod(shape)
        leaves.append(flat[offset : offset + size].reshape(shape).astype(dtype))
        offset += size
    return jax.tree.unflatten(layout.treedef, leaves)
