"""What happens when a gradient, or its sum with the residual, is not finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import transport
from sparse_collectives._types import AxisName

POLICIES = ("skip", "drop", "raise", "propagate", "ignore")


class Guarded(NamedTuple):
    """A step's increment after the policy.

    Attributes:
      increment: ``f32[1, n]``, what is added to the residual.
      velocity: ``f32[1, n]``, or ``()``.
      proceeds: ``bool[]``, the same on every worker; None where every step proceeds.
      dropped: ``i32[]``, entries of all workers that were left out.
    """

    increment: jax.Array
    velocity: Any
    proceeds: jax.Array | None
    dropped: jax.Array


def guard(
    policy: str,
    residual: jax.Array,
    increment: jax.Array,
    velocity: Any,
    old_velocity: Any,
    *,
    axis: AxisName,
    count: jax.Array,
) -> Guarded:
    """Applies a policy of :data:`POLICIES`.

    ``skip`` and ``raise`` exchange one word, ``drop`` another; ``propagate`` (``ignore``
    is another name for it) costs nothing.
    """
    none = jnp.zeros((), jnp.int32)
    if policy in ("propagate", "ignore"):
        return Guarded(increment, velocity, None, none)
    if policy == "drop":
        bad = ~jnp.isfinite(residual + increment)
        local = jnp.sum(bad, dtype=jnp.int32)
        return Guarded(
            jnp.where(bad, 0.0, increment),
            # As if the step had not been, for this entry.
            jax.tree.map(lambda new, old: jnp.where(bad, old, new), velocity, old_velocity),
            None,
            transport.psum(local, axis),
        )
    finite = _all_finite(residual, increment, axis)
    if policy == "raise":
        # Of the count only, which is the same on every worker.
        lax.cond(finite, _nothing, lambda step: jax.debug.callback(_raise, step), count)
    return Guarded(
        jnp.where(finite, increment, 0.0),
        jax.tree.map(lambda new, old: jnp.where(finite, new, old), velocity, old_velocity),
        finite,
        none,
    )


def _all_finite(residual: jax.Array, increment: jax.Array, axis: AxisName) -> jax.Array:
    """Whether every accumulator of every worker is finite; equal on all."""
    # x - x is 0 where x is finite and NaN elsewhere: one reduction of one read,
    # several times faster on CPU than reducing isfinite.
    acc = residual + increment
    local = jnp.sum(acc - acc)
    return transport.psum((local != 0).astype(jnp.int32), axis) == 0


def _nothing(step: jax.Array) -> None:
    del step


def _raise(step: Any) -> None:
    raise FloatingPointError(
        f"step {int(step)}: the gradient of some worker, or its sum with the residual, is not "
        "finite. jax.debug_nans finds where it comes from; nonfinite='skip' leaves such steps "
        "out, nonfinite='drop' such entries."
    )
