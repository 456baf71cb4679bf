"""Steps in which nothing is exchanged: a branch that is the same on every worker."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _compat


def only_if(
    now: jax.Array, exchange: Callable[[], tuple[Any, Any]], state: Any, *, scope: str
) -> tuple[Any, Any]:
    """The updates and the state of ``exchange()``; zeros and ``state`` where it is not ``now``.

    Args:
      now: ``bool[]``, the same on all devices, also on those along other axes of a mesh.
      exchange: returns updates and a state like ``state``.
      state: behind a step without it.
      scope: a name around the branch. The traffic meter reads from one that ends in ``.everyN`` how
        often the exchange takes place.
    """
    shapes, state_shapes = jax.eval_shape(exchange)

    def wait() -> tuple[Any, Any]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state

    def typed(result: tuple[Any, Any]) -> tuple[Any, Any]:
        # Branches must agree in what they type as varying.
        updates, new = result
        return (
            jax.tree.map(_compat.varying_like, updates, shapes),
            jax.tree.map(_compat.varying_like, new, state, state_shapes),
        )

    with jax.named_scope(scope):
        return lax.cond(now, lambda: typed(exchange()), lambda: typed(wait()))
