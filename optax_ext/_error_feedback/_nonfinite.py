"""Increments that are not finite, or too large, and what a step does about them."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, _axes, _varying, transport
from sparse_collectives._platform import by_platform, written
from sparse_collectives._sparse_ops import all_below

POLICIES = ("skip", "drop", "raise", "propagate")
# Those by which a step takes place as a whole, or not at all.
SKIPS = ("skip", "raise")

# The bound on increments if a worker may keep parts of what others sent. At an index the residuals
# of all P workers then grow by less than P times this in a step, and none reaches 2^128, where
# float32 overflows, within 2^25 / P steps.
LARGEST = 2.0**103

# The bound on gradients for transformations that sum their squares, so that the sums stay finite.
LARGEST_GRADIENT = 2.0**63


class Pending(NamedTuple):
    """The numbers that a worker is about to accumulate in one of its buffers.

    Attributes:
      residual: ``f32[1, n]``, or 0.0 for a buffer without one.
      decay: the factor on the residual if the step proceeds.
      increment: ``f32[1, n]``, added to the decayed residual.
      velocity: ``f32[1, n]``, or ``()``.
      old_velocity: the velocity before this step.
      bounded: whether an increment has to be smaller than :data:`LARGEST`.
      seen: the gradients ``f32[1, m]`` and the increment of the largest possible one,
        ``f32[1, 1]``, if these decide whether all increments are small. None: check the
        accumulator.
    """

    residual: Any
    decay: float | jax.Array
    increment: jax.Array
    velocity: Any
    old_velocity: Any
    bounded: bool = False
    seen: tuple[jax.Array, jax.Array] | None = None

    @property
    def checked(self) -> tuple[tuple[jax.Array, float], ...]:
        """Arrays to check, each with the bound that its magnitudes must stay below."""
        if self.seen is not None:
            return ((self.seen[0], LARGEST_GRADIENT),)
        unchanged = isinstance(self.decay, float) and self.decay == 1.0
        residual = self.residual if unchanged else self.decay * self.residual
        accumulated = residual + self.increment
        finite = accumulated, float("inf")
        return (finite, (self.increment, LARGEST)) if self.bounded else (finite,)


def guard(
    policy: str,
    parts: list[Pending],
    *,
    axis: AxisName,
    workers: AxisName,
    count: jax.Array,
    left_out: jax.Array,
) -> tuple[list[Pending], jax.Array | None, jax.Array]:
    """Applies a policy of :data:`POLICIES` to the pending increments.

    ``skip`` and ``raise`` exchange one word, and so does ``drop``; ``propagate`` costs nothing.
    ``left_out``, ``i32[]``, counts entries that were left out of the gradient before. The devices
    along ``axis`` decide together: all workers, or in a round of local steps the devices of one.
    ``raise`` ends the step on all ``workers``, since the others would wait for one that has ended.

    Returns:
      The remaining increments and velocities; ``bool[]``, whether all are finite, the same
      along ``axis``, or None if every step does; ``i32[]``, entries that were left out along it.
    """
    none = jnp.zeros((), jnp.int32)
    if policy == "propagate":
        return parts, None, none
    if policy == "drop":
        bad = [
            functools.reduce(operator.or_, (~(jnp.abs(x) < most) for x, most in part.checked))
            for part in parts
        ]
        local = sum((jnp.sum(x, dtype=jnp.int32) for x in bad), left_out)
        kept = [_without(part, x) for part, x in zip(parts, bad, strict=True)]
        return kept, None, _sum(local, axis)
    finite = _all_finite(parts, axis)
    if policy == "raise":

        def tell(finite: jax.Array, step: jax.Array) -> None:
            jax.debug.callback(_raise, finite, step)

        bad = _varying.to_varying((~finite).astype(jnp.int32), workers)
        of_all = _sum(bad, workers) == 0
        # Under vmap both branches may run: `_raise` checks again.
        lax.cond(of_all, _nothing, tell, of_all, count)
    return [_without(part, ~finite) for part in parts], finite, none


def zeroed(tree: Any, largest: float = float("inf")) -> tuple[Any, jax.Array]:
    """A tree with zeros for entries not below ``largest``, and the number of these entries."""
    finite = jax.tree.map(lambda x: jnp.abs(x) < largest, tree)
    bad = [jnp.sum(~x, dtype=jnp.int32) for x in jax.tree.leaves(finite)]
    kept = jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), finite, tree)
    return kept, sum(bad, jnp.zeros((), jnp.int32))


def all_finite(tree: Any, axis: AxisName) -> jax.Array:
    """Whether all entries of what the workers have alike are finite, ``bool[]``.

    Along other axes of a mapped function a device may hold a part of the leaves, and one word is
    exchanged; no message among the workers of ``axis``.
    """
    # Only the result is written. As operands, the entries would be written first.
    finite = written(lambda finite: finite, _are_finite(jax.tree.leaves(tree)))
    others = () if _axes.is_communicator(axis) else _axes.other_mesh_axes(axis)
    if others and _varying.checks_varying(axis):
        others = tuple(name for name in others if name in _varying.varying_axes(finite))
    if not others:
        return finite
    return _sum(_varying.to_varying((~finite).astype(jnp.int32), others), others) == 0


def _are_finite(leaves: list[jax.Array]) -> jax.Array:
    each = (jnp.all(jnp.isfinite(x)) for x in leaves)
    return functools.reduce(operator.and_, each, jnp.ones((), jnp.bool_))


def _without(part: Pending, bad: jax.Array) -> Pending:
    """``part`` without its increment, and with the old velocity, at ``bad``."""
    return part._replace(
        increment=jnp.where(bad, 0.0, part.increment),
        velocity=jax.tree.map(
            lambda new, old: jnp.where(bad, old, new), part.velocity, part.old_velocity
        ),
    )


def _all_finite(parts: list[Pending], axis: AxisName) -> jax.Array:
    """Whether every accumulator of every worker is finite; the same on all workers."""
    finite = jnp.ones((), jnp.bool_)
    for part in parts:
        finite &= all_below(*part.checked)
        if part.seen is not None:
            finite &= jnp.all(jnp.abs(part.seen[1]) < LARGEST)
    # Gradients may be typed as equal along axes of devices, which residuals never are.
    bad = _varying.to_varying((~finite).astype(jnp.int32), axis)
    return _sum(bad, axis) == 0


def _sum(number: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over ``axis``; without an axis a worker decides alone."""
    return transport.psum(number, axis) if _axes.axis_names(axis) else number


def either(condition: jax.Array, delivered: jax.Array, yes: Any, no: Any) -> Any:
    """One of two trees, by a condition that is known before the exchange.

    ``delivered``, ``i32[]``, is from the exchange.
    """
    # On CPU XLA copies the old buffers if they might be overwritten before the accumulator has
    # read them, so the condition depends on the exchange. A GPU writes both in one pass.
    condition = by_platform(
        lambda known, delivered: written(lambda x, y: x & (y >= 0), known, delivered),
        lambda known, delivered: known,
        condition,
        delivered,
    )
    return jax.tree.map(
        lambda new, old: new if new is old else jnp.where(condition, new, old), yes, no
    )


def _nothing(finite: jax.Array, step: jax.Array) -> None:
    del finite, step


def _raise(finite: Any, step: Any) -> None:
    if finite:
        return
    raise FloatingPointError(
        f"step {int(step)}: the gradient of some worker, or its sum with the residual, is not "
        "finite (or the gradient is 1e31 or more, with a limit, 16-bit leaves or an allreduce "
        "that may_keep_partial_sums, or 9e18 or more in sparse_adamw and sparse_sgd). "
        "jax.debug_nans finds its origin; nonfinite='skip' skips such steps, and nonfinite='drop' "
        "drops such entries."
    )
