"""Second moments of a worker's gradient: of each entry, by row and column, or by row."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._step import _accumulation

# What is kept of the squares of a matrix [r, c]: all r * c, r + c, or r.
MOMENTS = ("entries", "factors", "rows")


class ScaleByLocalAdamState(NamedTuple):
    """State of ``scale_by_local_adam()``, for each worker.

    Attributes:
      count: ``i32[]``, gradients seen.
      nu: second moments of the worker's own gradients, in the tree of the parameters.
    """

    count: jax.Array
    nu: Any


class ScaleByLocalRowsState(NamedTuple):
    """State of ``scale_by_local_adam(moments="rows")``, for each worker.

    Attributes:
      count: ``i32[]``, gradients seen.
      nu: means of the second moments over each row, with a 1 for the axis along it; of a leaf that
        has no rows the second moments.
    """

    count: jax.Array
    nu: Any


class ScaleByLocalFactorsState(NamedTuple):
    """State of ``scale_by_local_adam(moments="factors")``, for each worker.

    Attributes:
      count: ``i32[]``, gradients seen.
      nu: as in :class:`ScaleByLocalRowsState`.
      columns: means over each column, with a 1 for the axis along it; nothing but a number for a
        leaf that has no rows, so that there is one array for each.
    """

    count: jax.Array
    nu: Any
    columns: Any


def state_of(moments: str, params: Any) -> Any:
    """The state before the first gradient."""
    count = jnp.zeros((), jnp.int32)
    if moments == "entries":
        nu = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), params)
        return ScaleByLocalAdamState(count, nu)
    nu, columns = (
        jax.tree.map(lambda x, which=which: _zeros(jnp.shape(x), which), params) for which in (0, 1)
    )
    if moments == "rows":
        return ScaleByLocalRowsState(count, nu)
    return ScaleByLocalFactorsState(count, nu, columns)


def _zeros(shape: tuple[int, ...], which: int) -> jax.Array:
    """Of the rows (0) or the columns (1) of a leaf.

    The two largest axes are those of a matrix, the later ones of equal ones, and all others are of
    a stack of matrices, as in ``optax.adafactor``: layers that are scanned over share nothing.
    """
    matrix = sorted(int(axis) for axis in np.argsort(shape, kind="stable")[-2:])
    if len(matrix) < 2 or min(shape[axis] for axis in matrix) < 2:
        return jnp.zeros(() if which else shape, jnp.float32)
    along = matrix[1 - which]
    return jnp.zeros((*shape[:along], 1, *shape[along + 1 :]), jnp.float32)


def bounded(gradient: jax.Array) -> jax.Array:
    """NaN for what is so large that a mean of squares would overflow, so that it is seen."""
    small = jnp.abs(gradient) < _accumulation.LARGEST_GRADIENT
    return jnp.where(small, gradient, jnp.nan)


def next_of(moment: jax.Array, gradient: jax.Array, b2: Any) -> jax.Array:
    """The moment with this gradient in it: of its entries, or of means of their squares."""
    if moment.ndim < gradient.ndim:  # Of a leaf that has no columns.
        return moment
    # What a skipped step, or one that drops an entry, must not leave in the moments of a row.
    gradient = jnp.where(jnp.isnan(gradient), 0.0, gradient)
    return b2 * moment + (1 - b2) * _mean(gradient * gradient, moment)


def root_of(moment: jax.Array, columns: jax.Array | None, correction: jax.Array) -> jax.Array:
    """The root of the second moments, without bias; of factors r and c, of r c / mean(c)."""
    root = jnp.sqrt(moment / correction)
    if columns is None or columns.ndim < 2:
        return root
    mean = _mean(columns, moment)  # 0 before the first gradient that is not, and that of r.
    return root * jnp.sqrt(columns / jnp.where(mean > 0, mean, 1.0))


def _mean(x: jax.Array, like: jax.Array) -> jax.Array:
    """Along the axes in which ``like`` is of length 1; no sum is larger than what is in ``x``."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1)
    if all(x.shape[axis] == 1 for axis in axes):
        return x
    return jnp.sum(x / math.prod(x.shape[axis] for axis in axes), axis=axes, keepdims=True)
