"""What a worker accumulates: its residual, how that is kept, and what is not finite.

Whose residual a row of the state is, is marked: it counts for the worker that made it, and for no
other. What saves the state of one worker and gives it to all, as ``flax.jax_utils.unreplicate`` and
``replicate`` around a checkpoint do, would have every worker deliver the same residual. A number
beside it tells, without a collective and without a pass over it: the choice is made in the pass
that adds the gradient.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, Spec, _compat, _hash, _validation, transport
from sparse_collectives._coo import all_below

DTYPES = ("float32", "bfloat16")

# With many workers their residuals have more in common than 1/P says.
_LEAST = 0.1


class Residual(NamedTuple):
    """How a residual is kept; made by :func:`residual`.

    Attributes:
      dtype: float32 or bfloat16.
      decay: what the residual is multiplied with at each exchange, in [0, 1].
      step_ahead: how much of it is applied before a gradient is taken, as a multiple of the
        worker's own share. 0: none.
      spec: all of it, as text.
    """

    dtype: Any
    decay: float
    step_ahead: float
    spec: Spec | None


def residual(dtype: Any = jnp.float32, *, decay: float = 1.0, step_ahead: float = 0.0) -> Residual:
    """How the residual is kept from step to step, for ``sparse_allreduce(..., residual=)``.

    Args:
      dtype: float32, or bfloat16, rounded stochastically: half the memory, and conservation
        holds in expectation. In a step what a worker keeps of an entry is off by less than 2^-7 of
        it, up or down; over many entries and steps the errors cancel, and what is missing of the
        sum of all entries was about 1e-4 of it after 12 steps of five workers. The size of the
        gradients is no matter: those of 1e-20 lose the same share as those of 1, to the bit.
      decay: the residual is multiplied with it at each exchange, in [0, 1].
        Below 1 old gradients are forgotten, by intent; conservation then holds for
        ``acc_i = decay * residual_i + g_i``.
      step_ahead: worker i differentiates at ``params + a residual_i``, where a part of what
        waits has been applied (Xu, Huo and Huang, `Step-Ahead Error Feedback
        <https://arxiv.org/abs/2008.05823>`_, AAAI 2021). ``a`` is ``step_ahead`` times 1/P, the
        worker's own share of the mean of all residuals, or 0.1 with more than ten workers, and 1
        at most. ``math.inf`` makes it 1 for any number of workers: with an exchange ``every`` so
        many steps these then are local steps. The residual has to be an update of the parameters:
        ``local=`` has the learning rate, with its sign, as :func:`sparse_adamw` and
        :func:`sparse_sgd` do, whose ``step_ahead`` is 1. :func:`make_train_step` does it; in a loop
        of one's own it is :func:`ahead`.

    Raises:
      ValueError: another dtype, a decay out of [0, 1], a step_ahead below 0.

    Example:
      >>> residual(jnp.bfloat16, decay=0.99).spec
      Spec('residual(decay=0.99, dtype=bfloat16, step_ahead=0.0)')
    """
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(
            f"dtype={name} of the residual is none of {DTYPES}. float16 would overflow where "
            "gradients add up; write optax_ext.residual(jnp.bfloat16) for half of the memory."
        )
    kept, decay = jnp.dtype(dtype), _validation.check_number("decay", decay, 0.0, 1.0)
    step_ahead = _validation.check_number("step_ahead", step_ahead, 0.0, float("inf"))
    spec = Spec.of("residual", dtype=kept, decay=decay, step_ahead=step_ahead)
    return Residual(kept, decay, step_ahead, spec)


def coefficient(step_ahead: float, workers: int) -> float:
    """What a residual is multiplied with before a gradient is taken, with P workers."""
    return min(1.0, step_ahead * max(1.0 / workers, _LEAST))


def load(kept: jax.Array) -> jax.Array:
    """The residual as ``f32[1, n]``."""
    return kept.astype(jnp.float32)


def decayed(value: jax.Array, how: Residual, decays: jax.Array) -> jax.Array:
    """``value`` times the decay where ``decays``, ``bool[]``: not in steps that leave it alone."""
    if how.decay == 1.0:
        return value
    return value * jnp.where(decays, jnp.float32(how.decay), 1.0)


def store(value: jax.Array, how: Residual, *, axis: AxisName, count: jax.Array) -> jax.Array:
    """``value f32[1, n]`` in the dtype that is kept.

    bfloat16 is rounded stochastically: to one of the two neighbours, with probabilities
    that make the expectation exact. To the nearest, an entry that grows by less than a
    256th of itself in a step would never grow. A value that bfloat16 can hold is kept as
    it is.
    """
    if value.dtype == how.dtype:
        return value
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    seed = _hash.combine(count, transport.axis_index(axis))
    position = lax.broadcasted_iota(jnp.uint32, value.shape, value.ndim - 1)
    # One round of mixing: neighbouring steps of an entry have to look independent, no more.
    noise = _hash.mix(position ^ seed) >> 16
    truncated = _upper_half(bits)
    rounded = _upper_half(bits + noise)
    # What is not finite would become something else; the largest must not become infinite.
    keep = ~jnp.isfinite(value)
    nearest = value.astype(jnp.bfloat16)
    return jnp.where(keep, nearest, jnp.where(jnp.isfinite(rounded), rounded, truncated))


def _upper_half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def mark(axis: AxisName) -> jax.Array:
    """The mark of this worker, its index, ``i32[]``."""
    return transport.axis_index(axis)


def is_own(owner: jax.Array, axis: AxisName) -> jax.Array:
    """Whether ``owner``, ``i32[1]``, is a mark of this worker, ``bool[]``."""
    index = transport.axis_index(axis)
    return (owner[0] == index) | (owner[0] == _after_a_copy(index))


def own(value: jax.Array, owner: jax.Array, axis: AxisName) -> jax.Array:
    """``value`` if it is this worker's, and else zeros.

    A product: XLA may compute the accumulator in several loops, and with a choice in it was seen
    to round it in two ways, so that a threshold was not that of what it was compared with.
    """
    return value * is_own(owner, axis).astype(value.dtype)


def renewed(owner: jax.Array, axis: AxisName) -> jax.Array:
    """The mark after a step; one that says so where a copy was left out."""
    index = transport.axis_index(axis)
    return jnp.where(is_own(owner, axis), owner, _after_a_copy(index))


def has_left_out(owners: jax.Array) -> jax.Array:
    """By the marks of workers whether a copy was left out since the state was made."""
    return owners < 0


def _after_a_copy(index: jax.Array) -> jax.Array:
    return -1 - index


POLICIES = ("skip", "drop", "raise", "propagate")

# Where a worker may be left with parts of what others sent, an increment is smaller than this. In a
# step the residuals of all P workers together then grow by less than P times this at an index, and
# none can overflow, which is at 2^128, within 2^25 / P steps.
LARGEST = 2.0**103

# A transformation that squares a gradient, and adds squares up, has no more than finite sums of
# what is smaller.
LARGEST_GRADIENT = 2.0**63


class Pending(NamedTuple):
    """What a worker is about to accumulate in one of its buffers.

    Attributes:
      residual: ``f32[1, n]``, or 0.0 for a buffer without one.
      decay: what the residual is multiplied with where the step proceeds.
      increment: ``f32[1, n]``, what is added to that.
      velocity: ``f32[1, n]``, or ``()``.
      old_velocity: as before this step.
      bounded: whether an increment has to be smaller than :data:`LARGEST`.
      seen: the gradients ``f32[1, m]``, and the increment of the largest, ``f32[1, 1]``, which say
        by themselves whether all increments are small; None: the accumulator is looked at.
    """

    residual: Any
    decay: float
    increment: jax.Array
    velocity: Any
    old_velocity: Any
    bounded: bool = False
    seen: tuple[jax.Array, jax.Array] | None = None

    @property
    def checked(self) -> tuple[tuple[jax.Array, float], ...]:
        """What is looked at, and what its magnitudes have to be smaller than."""
        if self.seen is not None:
            return ((self.seen[0], LARGEST_GRADIENT),)
        residual = self.residual if self.decay == 1.0 else self.decay * self.residual
        accumulated = residual + self.increment
        finite = accumulated, float("inf")
        return (finite, (self.increment, LARGEST)) if self.bounded else (finite,)


def guard(
    policy: str, parts: list[Pending], *, axis: AxisName, count: jax.Array, left_out: jax.Array
) -> tuple[list[Pending], jax.Array | None, jax.Array]:
    """Applies a policy of :data:`POLICIES` to what is about to be accumulated.

    ``skip`` and ``raise`` exchange one word, ``drop`` another; ``propagate`` costs nothing.
    ``left_out``, ``i32[]``, entries have been left out of the gradient before. Those who decide
    together are the devices along ``axis``: all workers, or in a round of local steps those of one.

    Returns:
      The increments and velocities that remain; ``bool[]``, whether the step proceeds, the same
      along ``axis``, or None where every step does; ``i32[]``, entries that were left out along it.
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

        # Of workers that decide alone vmap makes both branches.
        lax.cond(finite, _nothing, tell, finite, count)
    return [_without(part, ~finite) for part in parts], finite, none


def zeroed(tree: Any, largest: float = float("inf")) -> tuple[Any, jax.Array]:
    """A tree with zeros for what is not below ``largest``, and how many entries that are."""
    finite = jax.tree.map(lambda x: jnp.abs(x) < largest, tree)
    bad = [jnp.sum(~x, dtype=jnp.int32) for x in jax.tree.leaves(finite)]
    kept = jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), finite, tree)
    return kept, sum(bad, jnp.zeros((), jnp.int32))


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
        finite &= all_below(*part.checked)
        if part.seen is not None:
            finite &= jnp.all(jnp.abs(part.seen[1]) < LARGEST)
    # Gradients alone may be the same along axes of devices, which residuals never are.
    bad = _compat.to_varying((~finite).astype(jnp.int32), axis)
    return _sum(bad, axis) == 0


def _sum(number: jax.Array, axis: AxisName) -> jax.Array:
    """Over no axis a worker decides alone."""
    return transport.psum(number, axis) if _compat.axis_names(axis) else number


def _nothing(finite: jax.Array, step: jax.Array) -> None:
    del finite, step


def _raise(finite: Any, step: Any) -> None:
    if finite:
        return
    raise FloatingPointError(
        f"step {int(step)}: the gradient of some worker, or its sum with the residual, is not "
        "finite (or the gradient is 1e31 or more, where the allreduce keeps_others, or 9e18 or "
        "more in front of sparse_adamw and sparse_sgd). "
        "jax.debug_nans finds where it comes from; nonfinite='skip' leaves such steps out, "
        "nonfinite='drop' such entries."
    )
