"""Workers with unequal numbers of examples: each counts by the weight that its loss returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparse_collectives import AxisName, transport


def separated(result: Any, has_aux: bool) -> tuple[Any, jax.Array]:
    """What the loss returned without its weight, and the weight, ``f32[]``.

    Raises:
      TypeError: it returned no pair of a loss and a weight, or the weight is not a scalar.
    """
    pair = result[0] if has_aux and isinstance(result, tuple) and len(result) == 2 else result
    if not (isinstance(pair, tuple) and len(pair) == 2) or jnp.shape(pair[1]):
        returned = "((loss, weight), aux)" if has_aux else "(loss, weight)"
        raise TypeError(
            f"loss_fn must return {returned}, as weighted=True says, with the mean over the own "
            "examples and the scalar that they count, such as their number: mask.sum()."
        )
    loss, weight = pair
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return (loss, result[1]) if has_aux else loss, weight


def shared(made: Any, weight: jax.Array, axis: AxisName) -> Any:
    """Each float times ``weight P / sum of the weights``, so that means are over the whole batch.

    A worker of weight 0 has zeros, even where its mean is 0/0. If no worker has a weight, or one is
    negative or not finite, all are NaN, and the step is skipped.
    """
    total = transport.psum(jnp.where(weight >= 0, weight, jnp.nan), axis)
    share = weight * transport.axis_size(axis) / total

    def scaled(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(share == 0, 0.0, x * share).astype(x.dtype)

    return jax.tree.map(scaled, jax.tree.map(jnp.asarray, made))
