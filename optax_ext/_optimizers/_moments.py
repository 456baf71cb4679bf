"""Second moments of a worker's gradient: by entry, by row and column, or by row."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._error_feedback import _nonfinite

# The numbers that are stored for a matrix [r, c]: r * c, r + c, or r.
MOMENTS = ("entries", "factors", "rows")
# The bound on the root mean square of an update. Adafactor has 1, for the mean gradient. The update
# of one worker's gradient has more noise, and is seldom above 2.
_RMS = 2.0


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
      nu: means of the second moments over each row, with length 1 along the row; for a leaf that
        is no matrix, the second moments.
    """

    count: jax.Array
    nu: Any


class ScaleByLocalFactorsState(NamedTuple):
    """State of ``scale_by_local_adam(moments="factors")``, for each worker.

    Attributes:
      count: ``i32[]``, gradients seen.
      nu: as in :class:`ScaleByLocalRowsState`.
      columns: means over each column, with length 1 along the column; an unused ``f32[]`` for a
        leaf that is no matrix, so that every leaf has an array.
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
    """Zeros for the rows (0) or the columns (1) of a leaf.

    The two largest axes, the later ones among equals, are the axes of a matrix, as in
    ``optax.adafactor``. The others stack matrices, so layers that are scanned over share nothing.
    """
    matrix = sorted(int(axis) for axis in np.argsort(shape, kind="stable")[-2:])
    if len(matrix) < 2 or min(shape[axis] for axis in matrix) < 2:
        return jnp.zeros(() if which else shape, jnp.float32)
    along = matrix[1 - which]
    return jnp.zeros((*shape[:along], 1, *shape[along + 1 :]), jnp.float32)


def bounded(gradient: jax.Array) -> jax.Array:
    """NaN for entries whose mean of squares could overflow, so that the step's check sees them."""
    small = jnp.abs(gradient) < _nonfinite.LARGEST_GRADIENT
    return jnp.where(small, gradient, jnp.nan)


def next_of(moment: jax.Array, gradient: jax.Array, b2: Any) -> jax.Array:
    """The moment after this gradient: of its entries, or of means of their squares."""
    if moment.ndim < gradient.ndim:  # The unused number of a leaf that is no matrix.
        return moment
    # A skipped step, or a dropped entry, must leave no NaN in the moments of a row.
    gradient = jnp.where(jnp.isnan(gradient), 0.0, gradient)
    return b2 * moment + (1 - b2) * _mean(gradient * gradient, moment)


def root_of(moment: jax.Array, columns: jax.Array | None, correction: jax.Array) -> jax.Array:
    """The root of the second moments without bias; for factors r and c, of r c / mean(c)."""
    root = jnp.sqrt(moment / correction)
    if columns is None or columns.ndim < 2:
        return root
    mean = _mean(columns, moment)  # The same as the mean of r; 0 until a gradient is not 0.
    return root * jnp.sqrt(columns / jnp.where(mean > 0, mean, 1.0))


def clipped(update: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """An update by factored moments, with a root mean square of at most _RMS in each matrix.

    One entry of a gradient that is a times the others raises the mean of all moments by more than
    the means of other rows and columns, whose roots are then too small by up to a / sqrt(r c).
    """
    if columns.ndim < 2:
        return update
    most = 2.0**60  # Its square and the mean of such squares are finite.
    update = jnp.clip(update, -most, most)
    # An entry that is not finite leaves its step out, or is left out alone.
    squares = jnp.where(jnp.isnan(update), 0.0, update * update)
    mean = _mean(_mean(squares, rows), columns)
    return update / jnp.maximum(1.0, jnp.sqrt(mean) / _RMS)


def _mean(x: jax.Array, like: jax.Array) -> jax.Array:
    """The mean along axes of length 1 in ``like``; no partial sum exceeds the largest of ``x``."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1)
    if all(x.shape[axis] == 1 for axis in axes):
        return x
    return jnp.sum(x / math.prod(x.shape[axis] for axis in axes), axis=axes, keepdims=True)
