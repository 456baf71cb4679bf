"""How a residual is stored, and how much of it is applied ahead."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, Spec, _hash, transport

DTYPES = ("float32", "bfloat16")

# Many residuals agree more than a share of 1/P assumes.
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

    dtype: Any = jnp.dtype("float32")
    decay: float = 1.0
    step_ahead: float = 0.0
    spec: Spec | None = Spec.of("residual", dtype=jnp.dtype("float32"), decay=1.0, step_ahead=0.0)


def share(step_ahead: float, residuals: int) -> float:
    """The part of the update in one of so many residuals that its gradients are taken after."""
    return min(1.0, step_ahead * max(1.0 / residuals, _LEAST))


def width(size: int) -> int:
    """The columns of a state's residual of ``size`` entries: one, which stays 0, without entries.

    Orbax saves no array without entries.
    """
    return max(size, 1)


def load(kept: jax.Array, size: int) -> jax.Array:
    """The residual as ``f32[1, size]``."""
    return (kept if size else kept[:, :0]).astype(jnp.float32)


def decayed(value: jax.Array, how: Residual, decays: jax.Array) -> jax.Array:
    """``value`` times the decay if ``decays``, ``bool[]``: some steps leave the residual alone."""
    if how.decay == 1.0:
        return value
    return value * jnp.where(decays, jnp.float32(how.decay), 1.0)


def store(value: jax.Array, how: Residual, *, axis: AxisName, count: jax.Array) -> jax.Array:
    """``value f32[1, n]`` as the residual of a state, in its dtype.

    Rounding to bfloat16 is stochastic: to one of the two nearest values, with probabilities
    that make the expectation exact. With rounding to nearest, an entry that grows by less than
    1/256 of itself in a step would never grow. A value that bfloat16 can represent is unchanged.
    """
    if not value.shape[-1]:
        return jnp.pad(value, ((0, 0), (0, width(0)))).astype(how.dtype)
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
