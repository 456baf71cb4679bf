"""Labels of leaves that are exchanged densely, by their shapes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparse_collectives import _validation


def small_leaves(*, min_size: int = 1024, min_ndim: int = 2) -> Callable[[Any], Any]:
    """Makes a label function: leaves that are small, or have few dimensions, are dense.

    Biases and the scales of normalization layers have few of the entries. Their gradients are
    dense and differ in magnitude from the gradients of matrices, so a common threshold selects
    all of their entries or none.

    Args:
      min_size: leaves with fewer entries are dense.
      min_ndim: leaves with fewer dimensions are dense.

    Returns:
      A function from parameters to a pytree of labels, ``"sparse"`` or ``"dense"``, for
      ``sparse_allreduce(..., dense_leaves=)`` or ``optax.multi_transform``.

    Raises:
      ValueError: an argument is not an integer of at least 0.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"kernel": jnp.zeros((64, 32)), "bias": jnp.zeros(32)}
      >>> small_leaves()(params)
      {'bias': 'dense', 'kernel': 'sparse'}
    """
    min_size = _validation.check_positive_int("min_size", min_size, minimum=0)
    min_ndim = _validation.check_positive_int("min_ndim", min_ndim, minimum=0)

    def label(leaf: Any) -> str:
        shape = jnp.shape(leaf)
        return "dense" if len(shape) < min_ndim or math.prod(shape) < min_size else "sparse"

    return lambda params: jax.tree.map(label, params)
