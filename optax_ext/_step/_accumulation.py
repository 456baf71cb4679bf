"""The accumulator of a worker: its residual, how it is stored, and numbers that are not finite.

Each row of a residual carries the mark of the worker that made it, and counts for that worker only.
Programs that save the state of one worker and give it to all, as ``flax.jax_utils.unreplicate`` and
``replicate`` around a checkpoint do, would otherwise make every worker deliver the same residual.
The mark detects that without a collective and without a pass of its own over the residual: the pass
that adds the gradient applies it.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, Spec, _compat, _hash, _validation, transport
from sparse_collectives._sparse_ops import all_below

DTYPES = ("float32", "bfloat16")

# With many workers, residuals agree more than a share of 1/P assumes.
_LEAST = 0.1


class Residual(NamedTuple):
    """How a residual is kept; made by :func:`residual`.

    Attributes:
      dtype: float32 or bfloat16.
      decay: the factor on the residual at each exchange, in [0, 1].
      step_ahead: how much of the residual is applied before a gradient is taken, as a multiple of
        the worker's own share. 0: nothing.
      spec: these options as text.
    """

    dtype: Any
    decay: float
    step_ahead: float
    spec: Spec | None


def residual(dtype: Any = jnp.float32, *, decay: float = 1.0, step_ahead: float = 0.0) -> Residual:
    """Options of the residual, for ``sparse_allreduce(..., residual=)``.

    Args:
      dtype: float32, or bfloat16 with stochastic rounding for half of the memory. With bfloat16,
        conservation holds in expectation. In a step, rounding changes the residual of an entry by
        less than 2^-7 of its value, up or down. Over many entries and steps the errors cancel:
        after 12 steps of five workers the sum of all entries was off by about 1e-4 of its value.
        The error does not depend on the size of the gradients: gradients of 1e-20 lose the same
        share as gradients of 1, to the bit.
      decay: the factor on the residual at each exchange, in [0, 1].
        Below 1 old gradients are forgotten, by intent; conservation then holds for
        ``acc_i = decay * residual_i + g_i``.
      step_ahead: worker i differentiates at the look-ahead parameters ``params + a residual_i``
        (Xu, Huo and Huang, `Step-Ahead Error Feedback <https://arxiv.org/abs/2008.05823>`_, AAAI
        2021). ``a`` is ``step_ahead`` times 1/P, the worker's own share of the mean of all
        residuals, or times 0.1 with more than ten workers, and at most 1. ``math.inf`` makes it 1
        for any number of workers; together with ``every`` this gives local steps. The residual has
        to be an update of the parameters: ``local=`` includes the learning rate and its sign, as in
        :func:`sparse_adamw` and :func:`sparse_sgd`, whose ``step_ahead`` is 1.
        :func:`make_train_step` takes gradients there; a loop of your own calls :func:`ahead`.

    Returns:
      A :class:`Residual`.

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
    """The factor on a residual that is applied before a gradient is taken, for P workers."""
    return min(1.0, step_ahead * max(1.0 / workers, _LEAST))


def load(kept: jax.Array) -> jax.Array:
    """The residual as ``f32[1, n]``."""
    return kept.astype(jnp.float32)


def decayed(value: jax.Array, how: Residual, decays: jax.Array) -> jax.Array:
    """``value`` times the decay if ``decays``, ``bool[]``: some steps leave the residual alone."""
    if how.decay == 1.0:
        return value
    return value * jnp.where(decays, jnp.float32(how.decay), 1.0)


def store(value: jax.Array, how: Residual, *, axis: AxisName, count: jax.Array) -> jax.Array:
    """``value f32[1, n]`` in the dtype of the residual.

    Rounding to bfloat16 is stochastic: to one of the two nearest values, with probabilities
    that make the expectation exact. With rounding to nearest, an entry that grows by less than
    1/256 of itself in a step would never grow. A value that bfloat16 can represent is unchanged.
    """
    if value.dtype == how.dtype:
        return value
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    seed = _hash.combine(count, transport.axis_index(axis))
    position = lax.broadcasted_iota(jnp.uint32, value.shape, value.ndim - 1)
    # One round of mixing is enough: only consecutive steps of an entry have to look independent.
    noise = _hash.mix(position ^ seed) >> 16
    truncated = _upper_half(bits)
    rounded = _upper_half(bits + noise)
    # Infinity and NaN would become other numbers, and the largest must not become infinite.
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
    """``value`` if it belongs to this worker, and zeros otherwise.

    A product instead of a select: XLA may compute the accumulator in several loops, and with a
    select these loops rounded differently, so that a threshold did not match the values compared.
    """
    return value * is_own(owner, axis).astype(value.dtype)


def renewed(owner: jax.Array, axis: AxisName) -> jax.Array:
    """The mark after a step; a negative one if a copy was left out."""
    index = transport.axis_index(axis)
    return jnp.where(is_own(owner, axis), owner, _after_a_copy(index))


def has_left_out(owners: jax.Array) -> jax.Array:
    """Whether each worker has left out a copy since the state was made, by its mark."""
    return owners < 0


def _after_a_copy(index: jax.Array) -> jax.Array:
    return -1 - index


POLICIES = ("skip", "drop", "raise", "propagate")

# The bound on increments if a worker may keep partial sums of what others sent. At an index the
# residuals of all P workers then grow by less than P times this in a step, and none reaches 2^128,
# where float32 overflows, within 2^25 / P steps.
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
    decay: float
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
        residual = self.residual if self.decay == 1.0 else self.decay * self.residual
        accumulated = residual + self.increment
        finite = accumulated, float("inf")
        return (finite, (self.increment, LARGEST)) if self.bounded else (finite,)


def guard(
    policy: str, parts: list[Pending], *, axis: AxisName, count: jax.Array, left_out: jax.Array
) -> tuple[list[Pending], jax.Array | None, jax.Array]:
    """Applies a policy of :data:`POLICIES` to the pending increments.

    ``skip`` and ``raise`` exchange one word, and so does ``drop``; ``propagate`` costs nothing.
    ``left_out``, ``i32[]``, counts entries that were left out of the gradient before. The devices
    along ``axis`` decide together: all workers, or in a round of local steps the devices of one.

    Returns:
      The remaining increments and velocities; ``bool[]``, whether the step proceeds, the same
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

        # Under vmap, with workers that decide alone, both branches run: `_raise` checks again.
        lax.cond(finite, _nothing, tell, finite, count)
    return [_without(part, ~finite) for part in parts], finite, none


def zeroed(tree: Any, largest: float = float("inf")) -> tuple[Any, jax.Array]:
    """A tree with zeros for entries not below ``largest``, and the number of these entries."""
    finite = jax.tree.map(lambda x: jnp.abs(x) < largest, tree)
    bad = [jnp.sum(~x, dtype=jnp.int32) for x in jax.tree.leaves(finite)]
    kept = jax.tree.map(lambda ok, x: jnp.where(ok, x, jnp.zeros_like(x)), finite, tree)
    return kept, sum(bad, jnp.zeros((), jnp.int32))


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
    bad = _compat.to_varying((~finite).astype(jnp.int32), axis)
    return _sum(bad, axis) == 0


def _sum(number: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over ``axis``; without an axis a worker decides alone."""
    return transport.psum(number, axis) if _compat.axis_names(axis) else number


def _nothing(finite: jax.Array, step: jax.Array) -> None:
    del finite, step


def _raise(finite: Any, step: Any) -> None:
    if finite:
        return
    raise FloatingPointError(
        f"step {int(step)}: the gradient of some worker, or its sum with the residual, is not "
        "finite (or the gradient is 1e31 or more, if the allreduce may_keep_partial_sums, or 9e18 "
        "or more in sparse_adamw and sparse_sgd). "
        "jax.debug_nans finds its origin; nonfinite='skip' skips such steps, and nonfinite='drop' "
        "drops such entries."
    )
