"""A transformation of each worker's own gradient, in front of the accumulation."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._step import _sparse_state
from sparse_collectives import extend
from sparse_collectives.extend import AxisName


def init(tx: optax.GradientTransformation | None, params: Any) -> Any:
    """Its state, without a leading axis; float32 whatever the dtypes of the leaves."""
    if tx is None:
        return ()
    return tx.init(jax.tree.map(_in_float32, params))


def update(
    tx: optax.GradientTransformation | None, gradients: Any, state: Any, params: Any, axis: AxisName
) -> tuple[Any, Any]:
    """What is accumulated in place of the gradients, and the next state.

    Args:
      tx: the transformation, or None.
      gradients: of this worker.
      state: as in the optimizer state: with a leading axis of 1.
      params: the parameters, or None.
      axis: of the workers.
    """
    if tx is None:
        return gradients, ()
    # The increments of a 16-bit leaf add up in float32, and so they are made in it.
    gradients = jax.tree.map(_in_float32, gradients)
    params = None if params is None else jax.tree.map(_in_float32, params)
    gradients, state = tx.update(gradients, _sparse_state.without_lead(state), params)
    return gradients, extend.to_varying(_sparse_state.with_lead(state), axis)


def describe(tx: optax.GradientTransformation | None, state: Any) -> str:
    """The states that it keeps, as :func:`init` made them, for a checkpoint's metadata.

    optax's transformations don't say what they were made with, and a rate may change from
    run to run; what has to agree is what is kept.
    """
    if tx is None:
        return "none"
    names: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, tuple):
            if hasattr(node, "_fields"):
                names.append(type(node).__name__)
            for child in node:
                collect(child)

    collect(state)
    return ", ".join(names) or "no state"


def _in_float32(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)
