"""What happens when something is not finite: a gradient, a sum over the workers, an update."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, PaddedCOO, Undelivered, transport
from sparse_collectives._coo import all_finite

POLICIES = ("skip", "drop", "raise", "propagate")
# Where a worker may be left with parts of what others sent, an increment is smaller than this. In a
# step the residuals of all P workers together then grow by less than P times this at an index, and
# none can overflow, which is at 2^128, within 2^25 / P steps.
LARGEST = 2.0**103


class Pending(NamedTuple):
    """What a worker is about to accumulate in one of its buffers.

    Attributes:
      residual: ``f32[1, n]``, or 0.0 for a buffer without one.
      decay: what the residual is multiplied with where the step proceeds.
      increment: ``f32[1, n]``, what is added to that.
      velocity: ``f32[1, n]``, or ``()``.
      old_velocity: as before this step.
      bounded: whether an increment has to be smaller than :data:`LARGEST`.
    """

    residual: Any
    decay: float
    increment: jax.Array
    velocity: Any
    old_velocity: Any
    bounded: bool = False

    @property
    def checked(self) -> tuple[jax.Array, ...]:
        """What has to be finite: the accumulator, and what is infinite beyond the bound."""
        residual = self.residual if self.decay == 1.0 else self.decay * self.residual
        accumulated = residual + self.increment
        if not self.bounded:
            return (accumulated,)
        return accumulated, self.increment * jnp.float32(2.0**128 / LARGEST)


def guard(
    policy: str, parts: list[Pending], *, axis: AxisName, count: jax.Array, left_out: jax.Array
) -> tuple[list[Pending], jax.Array | None, jax.Array]:
    """Applies a policy of :data:`POLICIES` to what is about to be accumulated.

    ``skip`` and ``raise`` exchange one word, ``drop`` another; ``propagate`` costs nothing.
    ``left_out``, ``i32[]``, entries have been left out of the gradient before.

    Returns:
      The increments and velocities that remain; ``bool[]``, whether the step proceeds, the same
      on every worker, or None where every step does; ``i32[]``, entries of all workers that were
      left out.
    """
    none = jnp.zeros((), jnp.int32)
    if policy == "propagate":
        return parts, None, none
    if policy == "drop":
        bad = [
            functools.reduce(operator.or_, (~jnp.isfinite(x) for x in part.checked))
            for part in parts
        ]
        local = sum((jnp.sum(x, dtype=jnp.int32) for x in bad), left_out)
        kept = [_without(part, x) for part, x in zip(parts, bad, strict=True)]
        return kept, None, transport.psum(local, axis)
    finite = _all_finite(parts, axis)
    if policy == "raise":
        # Of the count only, which is the same on every worker.
        lax.cond(finite, _nothing, lambda step: jax.debug.callback(_raise, step), count)
    return [_without(part, ~finite) for part in parts], finite, none


def zeroed(tree: Any) -> tuple[Any, jax.Array]:
    """A tree with zeros for what is not finite, and how many entries that are."""
    finite = jax.tree.map(jnp.isfinite, tree)
    bad = [jnp.sum(~x, dtype=jnp.int32) for x in jax.tree.leaves(finite)]
    kept = jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), finite, tree)
    return kept, sum(bad, jnp.zeros((), jnp.int32))


def dense_mean(policy: str, total: jax.Array, workers: int) -> tuple[jax.Array, jax.Array]:
    """The mean of a dense sum over the workers, and how many entries were left out.

    Nothing keeps what a dense allreduce has summed up, so an entry whose sum is not finite
    is left out; with ``propagate`` it reaches the update.
    """
    mean = total / workers
    if policy == "propagate":
        return mean, jnp.zeros((), jnp.int32)
    finite = jnp.isfinite(total)
    return jnp.where(finite, mean, 0.0), jnp.sum(~finite, dtype=jnp.int32)


def withhold(
    policy: str, total: PaddedCOO | jax.Array, sent: PaddedCOO, undelivered: Undelivered
) -> tuple[PaddedCOO | jax.Array, Undelivered, jax.Array]:
    """Takes out of a dense total what is not finite, and gives it back to the workers.

    The sum of finite entries may overflow. Each worker then keeps its own part of such an
    entry, whole, so that nothing is lost and the residuals stay finite. The sums of a
    sparse total are finite by the contract of :class:`SparseAllreduce`.

    Returns:
      The total, what this worker keeps, and ``i32[]``, how many entries that were.
    """
    none = jnp.zeros((), jnp.int32)
    if policy == "propagate" or isinstance(total, PaddedCOO):
        return total, undelivered, none
    dense = total
    finite = jnp.isfinite(dense)

    def delivered(indices):
        # Of the few entries again: all of ``finite`` would be an array of n bytes.
        return jnp.isfinite(dense.at[indices].get(mode="fill", fill_value=0))

    slots = jnp.where(delivered(sent.indices), undelivered.slots, sent.values)
    others = undelivered.others
    if others.capacity:
        # What rounding took off a sum that nobody gets is in the parts already.
        values = jnp.where(delivered(others.indices), others.values, jnp.zeros_like(others.values))
        others = PaddedCOO(values, others.indices, others.size)
    total = jnp.where(finite, dense, jnp.zeros_like(dense))
    undelivered = undelivered._replace(slots=slots, others=others)
    return total, undelivered, jnp.sum(~finite, dtype=jnp.int32)


def _without(part: Pending, bad: jax.Array) -> Pending:
    """As if the step had not been, where ``bad``."""
    return part._replace(
        increment=jnp.where(bad, 0.0, part.increment),
        velocity=jax.tree.map(
            lambda new, old: jnp.where(bad, old, new), part.velocity, part.old_velocity
        ),
    )


def _all_finite(parts: list[Pending], axis: AxisName) -> jax.Array:
    """Whether every accumulator of every worker is finite; equal on all."""
    finite = jnp.ones((), jnp.bool_)
    for part in parts:
        finite &= all_finite(*part.checked)
    return transport.psum((~finite).astype(jnp.int32), axis) == 0


def _nothing(step: jax.Array) -> None:
    del step


def _raise(step: Any) -> None:
    raise FloatingPointError(
        f"step {int(step)}: the gradient of some worker, or its sum with the residual, is not "
        "finite (or the gradient is 1e31 or more, where the allreduce keeps_others). "
        "jax.debug_nans finds where it comes from; nonfinite='skip' leaves such steps out, "
        "nonfinite='drop' such entries."
    )
