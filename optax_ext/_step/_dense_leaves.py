"""Which leaves of the parameters are exchanged densely instead of in the sparse buffer."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparse_collectives import _validation

LABELS = ("sparse", "dense")


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


def resolve(labels: Any, params: Any) -> tuple[bool, ...] | None:
    """Whether each leaf of ``params`` is dense, in the order of the leaves.

    Args:
      labels: None, a label function, or a pytree of labels. A label holds for all leaves
        below it, as in ``optax.multi_transform``.
      params: the parameters.

    Raises:
      ValueError: a leaf without a label, a label without a leaf, another label.
    """
    if labels is None:
        return None
    flat = jax.tree_util.tree_flatten_with_path
    labels = flat(labels(params) if callable(labels) else labels)[0]
    for path, label in labels:
        if label not in LABELS:
            raise ValueError(
                f"dense_leaves labels params{jax.tree_util.keystr(path)} {label!r}: a label is one "
                f"of {LABELS}."
            )
    found, used = [], set()
    for path, _ in flat(params)[0]:
        above = [at for at, _ in labels if path[: len(at)] == at]
        if not above:
            raise ValueError(
                f"dense_leaves has no label for params{jax.tree_util.keystr(path)}. Label every "
                "leaf 'sparse' or 'dense'; optax_ext.small_leaves() does it by shape."
            )
        used.add(above[0])
        found.append(dict(labels)[above[0]] == "dense")
    unused = [at for at, _ in labels if at not in used]
    if unused:
        raise ValueError(
            f"dense_leaves has a label for params{jax.tree_util.keystr(unused[0])}, which is no "
            "leaf of the parameters and has none below it."
        )
    return tuple(found)
