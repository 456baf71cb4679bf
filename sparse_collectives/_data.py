"""The data types of the contracts: sparse vectors, and the layers of a flat vector."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_collectives import _validation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedCOO:
    """Value-index pairs of a vector of length ``size`` in ``capacity`` slots.

    XLA needs static shapes, so the number of slots is fixed and unused slots are
    padding: index ``size`` (one past the end) and value 0. A scatter with
    ``mode='drop'`` ignores padding, and padding does not change a sum.

    The indices of a selection are unique and ascending, with the padding last. The indices of an
    allreduce's total are unique, but padding may stand between them.

    Attributes:
      values: ``f[..., capacity]``.
      indices: ``i32[..., capacity]``, in ``[0, size]``; ``size`` marks padding.
      size: static ``int``, the length n of the vector.

    Example:
      >>> import jax.numpy as jnp
      >>> coo = PaddedCOO(jnp.array([3.0, -1.0, 0.0]), jnp.array([1, 4, 5]), 5)
      >>> coo.to_dense().tolist()
      [0.0, 3.0, 0.0, 0.0, -1.0]
      >>> int(coo.count())
      2
    """

    values: jax.Array
    indices: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_pairs(cls, indices: jax.Array, values: jax.Array, size: int) -> "PaddedCOO":
        """Makes a vector from value-index pairs in any order; the values of one index are added.

        Use it for gradients that are pairs, such as the gradients of embeddings or of linear models
        on sparse rows. It does not make a vector of length ``size``.

        Args:
          indices: ``i32[c]``; an index that is not in ``[0, size)``, such as -1, marks padding.
          values: ``f[c]``; the values of padding are ignored. All others are added in float32 (in
            float64 if they are float64), in the order in which they come.
          size: the length n of the vector.

        Returns:
          A PaddedCOO of c slots with unique ascending indices, padding last. Cost: a sort of c
          pairs.

        Raises:
          ValueError: ``indices`` and ``values`` are not of one shape ``[c]``, or ``size`` is not in
            [1, 2**31 - 1].
          TypeError: one is not an array, the indices are not integers, or the values not floats.
          TypeError: ``size`` is not an integer.

        Example:
          >>> import jax.numpy as jnp
          >>> coo = PaddedCOO.from_pairs(jnp.array([4, 1, 4]), jnp.array([1.0, 2.0, 3.0]), 5)
          >>> coo.indices.tolist(), coo.values.tolist()
          ([1, 4, 5], [2.0, 4.0, 0.0])
        """
        _check_pairs(indices, values)
        size = _validation.check_size(size)
        slots = indices.shape[0]
        if indices.dtype.itemsize < 4:  # Such a dtype may not hold the size.
            indices = indices.astype(jnp.int32)
        is_padding = (indices < 0) | (indices >= size)
        indices = jnp.where(is_padding, size, indices).astype(jnp.int32)
        indices, values = lax.sort((indices, values), num_keys=1)
        is_new = jnp.diff(indices, prepend=-1) > 0
        slot = jnp.where(indices < size, jnp.cumsum(is_new, dtype=jnp.int32) - 1, slots)
        wide = sum_dtype(values.dtype)
        sums = jnp.zeros((slots,), wide).at[slot].add(values.astype(wide), mode="drop")
        unique = jnp.full((slots,), size, jnp.int32).at[slot].set(indices, mode="drop")
        return cls(sums.astype(values.dtype), unique, size)

    @property
    def capacity(self) -> int:
        """The static number of slots."""
        return self.indices.shape[-1]

    def count(self) -> jax.Array:
        """The number of slots in use, ``i32[...]``."""
        return jnp.sum(self.indices < self.size, axis=-1, dtype=jnp.int32)

    def to_dense(self) -> jax.Array:
        """The dense vector, ``f[..., size]``. Cost: one write of n values and a scatter."""
        if self.indices.ndim > 1:
            return jax.vmap(PaddedCOO.to_dense)(self)
        # This zero depends on the indices. XLA would make n constant zeros at the start of a
        # program, and hold them during the computation of the indices.
        zero = jnp.sum(jnp.minimum(self.indices[:1], 0)).astype(self.values.dtype)
        dense = jnp.full((self.size,), zero)
        # The values are set and not added: an addition flushes subnormals on some platforms.
        return dense.at[self.indices].set(self.values, mode="drop")


def _check_pairs(indices: Any, values: Any) -> None:
    for name, array in (("indices", indices), ("values", values)):
        _validation.check_is_array(name, array)
    if indices.ndim != 1 or indices.shape != values.shape:
        raise ValueError(
            f"indices and values must be of one shape [c], got {indices.shape} and {values.shape}."
        )
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices must be integers, got {indices.dtype}.")
    _validation.check_float("values", values.dtype, float64=True)


def sum_dtype(dtype: type[Any] | np.dtype[Any]) -> type[Any]:
    """The dtype in which values are added up: float64 for float64, else float32."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def empty(size: int, capacity: int, dtype: type[Any] | np.dtype[Any] = jnp.float32) -> PaddedCOO:
    """A PaddedCOO of padding only."""
    return PaddedCOO(jnp.zeros((capacity,), dtype), jnp.full((capacity,), size, jnp.int32), size)


def widen(coo: PaddedCOO, capacity: int) -> PaddedCOO:
    """The same entries in ``capacity`` slots, at least as many as ``coo`` has."""
    padding = [(0, 0)] * (coo.indices.ndim - 1) + [(0, capacity - coo.capacity)]
    indices = jnp.pad(coo.indices, padding, constant_values=coo.size)
    return PaddedCOO(jnp.pad(coo.values, padding), indices, coo.size)


def concatenate(parts: Sequence[PaddedCOO]) -> PaddedCOO:
    """The entries of all parts side by side; an index may then occur more than once."""
    return PaddedCOO(
        jnp.concatenate([part.values.reshape(-1) for part in parts]),
        jnp.concatenate([part.indices.reshape(-1) for part in parts]),
        parts[0].size,
    )


def only_where(condition: jax.Array, coo: PaddedCOO) -> PaddedCOO:
    """The entries where ``condition`` (broadcast to the slots) holds, else padding."""
    return PaddedCOO(
        jnp.where(condition, coo.values, jnp.zeros_like(coo.values)),
        jnp.where(condition, coo.indices, coo.size),
        coo.size,
    )


def take(coo: PaddedCOO, source: jax.Array) -> PaddedCOO:
    """The given slots of ``coo``; slots past its capacity give padding."""
    values = coo.values.at[source].get(mode="fill", fill_value=0)
    indices = coo.indices.at[source].get(mode="fill", fill_value=coo.size)
    return PaddedCOO(values, indices, coo.size)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes of the layers, in the order in which they fill the flat buffer.

    A selector that works by layer or by row needs them, and receives them at
    ``init``. A layout is static and holds no arrays: in a state it is part of the tree.

    Attributes:
      shapes: the shape of each layer. A layer without entries takes no space.

    Raises:
      ValueError: the layers have no entries, or 2**31 or more.

    Example:
      >>> layout = Layout(((2, 3), (3,)))
      >>> layout.size, layout.sizes, layout.offsets
      (9, (6, 3), (0, 6))
    """

    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _validation.check_size(self.size)

    @classmethod
    def of(cls, tree: Any) -> "Layout":
        """The layout of the leaves of a pytree, in the order of ``jax.tree.leaves``."""
        return cls(tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(tree)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each layer."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """n, the number of entries of all layers."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The index of the first entry of each layer in the flat buffer."""
        sizes = self.sizes
        return tuple(sum(sizes[:layer]) for layer in range(len(sizes)))


def rows_of_layer(shape: tuple[int, ...], row_axis: int) -> tuple[int, int, int]:
    """A layer as an array ``[before, rows, behind]``, whose middle axis numbers the rows.

    A layer with one dimension, or none, is one row.

    Raises:
      ValueError: a layer of two or more dimensions has no such axis.
    """
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    if not -len(shape) <= row_axis < len(shape):
        raise ValueError(
            f"row_axis={row_axis} is not an axis of a layer of shape {shape}. Use -1 for "
            "the last axis of every layer, or 0 for the first."
        )
    at = row_axis % len(shape)
    return math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])


def as_layout(size: int | Layout) -> Layout:
    """A layout; a number of entries becomes one layer of one dimension."""
    if isinstance(size, Layout):
        return size
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(
            f"size must be a number of entries or a Layout, got {size!r}. Write "
            "init(x.size), or init(Layout.of(params)) for a selection by layer."
        )
    return Layout(((int(size),),))
