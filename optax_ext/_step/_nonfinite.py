"""What happens when a gradient, or its sum with the residual, is not finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import transport
from sparse_collectives._types import AxisName

POLICIES = ("skip", "drop", "raise", "propagate", "ignore")


class Part(NamedTuple):
    """What a worker is about to accumulate in one of its buffers.

    Attributes:
      residual: ``f32[1, n]``, or 0.0 for a buffer without one.
      increment: ``f32[1, n]``, what is added to the residual.
      velocity: ``f32[1, n]``, or ``()``.
      old_velocity: as before this step.
    """

    residual: Any
    increment: jax.Array
    velocity: Any
    old_velocity: Any


class Guarded(NamedTuple):
    """A step after the policy.

    Attributes:
      parts: the increments and velocities that remain.
      proceeds: ``bool[]``, the same on every worker; None where every step proceeds.
      dropped: ``i32[]``, entries of all workers that were left out.
    """

    parts: list[Part]
    proceeds: jax.Array | None
    dropped: jax.Array


def guard(policy: str, parts: list[Part], *, axis: AxisName, count: jax.Array) -> Guarded:
    """Applies a policy of :data:`POLICIES`.

    ``skip`` and ``raise`` exchange one word, ``drop`` another; ``propagate`` (``ignore``
    is another name for it) costs nothing.
    """
    none = jnp.zeros((), jnp.int32)
    if policy in ("propagate", "ignore"):
        return Guarded(parts, None, none)
    if policy == "drop":
        bad = [~jnp.isfinite(part.residual + part.increment) for part in parts]
        local = sum((jnp.sum(x, dtype=jnp.int32) for x in bad), none)
        kept = [_without(part, x) for part, x in zip(parts, bad, strict=True)]
        return Guarded(kept, None, transport.psum(local, axis))
    finite = _all_finite(parts, axis)
    if policy == "raise":
        # Of the count only, which is the same on every worker.
        lax.cond(finite, _nothing, lambda step: jax.debug.callback(_raise, step), count)
    return Guarded([_without(part, ~finite) for part in parts], finite, none)


def _without(part: Part, bad: jax.Array) -> Part:
    """As if the step had not been, where ``bad``."""
    return part._replace(
        increment=jnp.where(bad, 0.0, part.increment),
        velocity=jax.tree.map(
            lambda new, old: jnp.where(bad, old, new), part.velocity, part.old_velocity
        ),
    )


def _all_finite(parts: list[Part], axis: AxisName) -> jax.Array:
    """Whether every accumulator of every worker is finite; equal on all."""
    local = jnp.zeros(())
    for part in parts:
        # x - x is 0 where x is finite and NaN elsewhere: one reduction of one read,
        # several times faster on CPU than reducing isfinite.
        acc = part.residual + part.increment
        local += jnp.sum(acc - acc)
    return transport.psum((local != 0).astype(jnp.int32), axis) == 0


def _nothing(step: jax.Array) -> None:
    del step


def _raise(step: Any) -> None:
    raise FloatingPointError(
        f"step {int(step)}: the gradient of some worker, or its sum with the residual, is not "
        "finite. jax.debug_nans finds where it comes from; nonfinite='skip' leaves such steps "
        "out, nonfinite='drop' such entries."
    )
