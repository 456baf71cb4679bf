"""Steps without an exchange, as a branch that is the same on every worker."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _varying


def only_if(
    now: jax.Array, exchange: Callable[[], tuple[Any, Any]], state: Any, *, scope: str
) -> tuple[Any, Any]:
    """The updates and the state of ``exchange()`` if ``now``, otherwise zeros and ``state``.

    Args:
      now: ``bool[]``, the same on all devices of the mesh, along other axes also.
      exchange: returns updates and a state like ``state``.
      state: the state after a step without an exchange.
      scope: the name scope of the branch. A suffix ``.everyN`` gives the traffic meter the number
        of steps from one exchange to the next.
    """
    exchange = jax.jit(exchange, inline=True)  # Traced once, for its shapes and as a branch.
    shapes, state_shapes = jax.eval_shape(exchange)

    def wait() -> tuple[Any, Any]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state

    def typed(result: tuple[Any, Any]) -> tuple[Any, Any]:
        # Both branches must have the same types, varying axes included.
        updates, new = result
        return (
            jax.tree.map(_varying.varying_like, updates, shapes),
            jax.tree.map(_varying.varying_like, new, state, state_shapes),
        )

    with jax.named_scope(scope):
        return lax.cond(now, lambda: typed(exchange()), lambda: typed(wait()))
