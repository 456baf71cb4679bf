r"""The empirical :math:`\xi` of the convergence proof of Ok-Topk."""

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._coo import _bits, kth_magnitude
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce import Hierarchical, _hierarchical


def xi(
    accumulated: jax.Array,
    increment: jax.Array,
    mean: jax.Array,
    delivered: jax.Array,
    *,
    axis: AxisName,
    hierarchy: Hierarchical | None,
) -> jax.Array:
    r"""How far an update is from the true global top-k, in norms of the gradient.

    .. math::

        \xi = \frac{\| Topk(\frac1P \sum_i acc_i) - update \|}{\| \frac1P \sum_i g_i \|}

    with k the entries of the update. Paper 000 (Ok-Topk), Equation 5: it assumes that
    this stays bounded, and finds that values below P do no harm.

    Args:
      accumulated: ``f32[n]``, the residual plus the increment of this worker.
      increment: ``f32[n]``, what was accumulated at this step (with the learning rate or
        the velocity, where these are accumulated).
      mean: ``f32[n]``, the update.
      delivered: ``i32[]``, its entries.
      axis: of all workers.
      hierarchy: where there is one, the arrays are those of a shard.

    Returns:
      ``f32[]``, the same on every worker; 0 where the gradient is.

    Cost: a dense allreduce of 2 n words, an exact k-th magnitude, some passes over n.
    """
    workers = transport.axis_size(axis)
    over = axis
    if hierarchy is not None:
        over = _hierarchical.outer_axis(axis, hierarchy.inner_axis)
    accumulated = transport.psum(accumulated, over) / workers
    gradient = transport.psum(increment, over) / workers
    size = accumulated.shape[0]
    k = jnp.clip(delivered, 1, size)
    if hierarchy is not None:
        # The shards have no common order: of each shard its share.
        k = jnp.clip(delivered // transport.axis_size(hierarchy.inner_axis), 1, size)
    chosen, _ = kth_magnitude.largest_mask(_bits.magnitude_bits(accumulated), k)
    off = jnp.sum(jnp.square(jnp.where(chosen & (delivered > 0), accumulated, 0.0) - mean))
    norm = jnp.sum(jnp.square(gradient))
    if hierarchy is not None:
        off, norm = transport.psum(jnp.stack([off, norm]), hierarchy.inner_axis)
    return jnp.where(norm > 0, jnp.sqrt(off / jnp.where(norm > 0, norm, 1.0)), 0.0)
