"""How the residual is kept from step to step: its dtype, and its decay."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, Spec, _hash, _validation, transport

DTYPES = ("float32", "bfloat16")
# With many workers their residuals have more in common than 1/P says.
_LEAST = 0.1


class Residual(NamedTuple):
    """How a residual is kept; made by :func:`residual`.

    Attributes:
      dtype: float32 or bfloat16.
      decay: what the residual is multiplied with at each step, in [0, 1].
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
      decay: the residual is multiplied with it at each step that accumulates, in [0, 1].
        Below 1 old gradients are forgotten, by intent; conservation then holds for
        ``acc_i = decay * residual_i + g_i``.
      step_ahead: worker i differentiates at ``params + a residual_i``, where a part of what
        waits has been applied (Xu, Huo and Huang, `Step-Ahead Error Feedback
        <https://arxiv.org/abs/2008.05823>`_, AAAI 2021). ``a`` is ``step_ahead`` times 1/P, the
        worker's own share of the mean of all residuals, or 0.1 with more than ten workers, and 1
        at most. The residual has to be an update of the parameters: ``local=`` has the learning
        rate, with its sign, as :func:`sparse_adamw` and :func:`sparse_sgd` do, whose ``step_ahead``
        is 1. :func:`make_train_step` does it; in a loop of one's own it is :func:`ahead`.

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
