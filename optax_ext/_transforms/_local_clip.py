"""Clipping of each worker's own gradient, before it is accumulated."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _options, _trace_checks
from sparse_collectives import AxisName


def local_clip_by_global_norm(
    max_norm: float | jax.Array, *, axis: AxisName
) -> optax.GradientTransformationExtraArgs:
    r"""Clips each worker's gradient to a norm of ``max_norm / sqrt(P)``.

    .. math:: g_i = g_i \min(1, \frac{max\_norm}{\sqrt P \, \lVert g_i \rVert_2})

    Clipping after a sparse allreduce is too late, since the update contains the residuals of
    many steps. The sum of P gradients with independent entries has ``sqrt(P)``
    times the norm of one, which gives the bound. "Global" means over all leaves, not over all
    workers: nothing is exchanged. Cost: three passes over n entries.

    Entries that are not finite are left out of the norm and passed on unchanged to
    the ``nonfinite`` policy of :func:`sparse_allreduce`.

    Args:
      max_norm: the bound for the sum over the workers, positive and finite; a scalar array from
        ``optax.inject_hyperparams`` is not checked.
      axis: the mesh axis (or a tuple of axes) of the workers.

    Returns:
      A stateless ``optax.GradientTransformation`` to chain before
      :func:`sparse_allreduce`. Its updates have the dtypes of the gradients.

    Raises:
      ValueError: ``max_norm`` is not positive and finite.
      ValueError: the axis is not bound.
      ValueError: the gradients are already summed over it.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> tx = local_clip_by_global_norm(2.0, axis="w")
      >>> clip = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=4)
      >>> clip(jnp.array([[0.0, 4.0], [0.5, 0.0], [0.0, 0.0], [-2.0, 0.0]])).tolist()
      [[0.0, 1.0], [0.5, 0.0], [0.0, 0.0], [-1.0, 0.0]]

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_,
      ICLR 2018, section 3.2.
    """
    max_norm = _options.check_hyperparameter("max_norm", max_norm, 0.0, math.inf)
    if isinstance(max_norm, float) and not max_norm:
        raise ValueError(
            f"max_norm must be positive and finite, got {max_norm}. Leave the transformation out "
            "of the chain for no clipping."
        )

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any = None):
        del params
        bound = max_norm / math.sqrt(_trace_checks.workers(axis))
        updates = _trace_checks.own_gradients(updates, axis)
        leaves = [leaf for leaf in jax.tree.leaves(updates) if leaf.size]
        if not leaves:
            return updates, state
        finite = [jnp.abs(jnp.where(jnp.isfinite(x), x, 0)).astype(jnp.float32) for x in leaves]
        # In units of the largest entry: otherwise the squares may overflow or underflow.
        largest = jnp.max(jnp.stack([jnp.max(x) for x in finite]))
        unit = jnp.where(largest > 0, largest, 1.0)
        norm = jnp.sqrt(sum(jnp.sum((x / unit) ** 2) for x in finite))
        factor = jnp.minimum(1.0, bound / unit / jnp.maximum(norm, 1.0))

        def clip(x):
            wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
            return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)

        return jax.tree.map(clip, updates), state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)
