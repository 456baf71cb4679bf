"""Code that the lossy codecs share: rounding, range, and the error that they report.

The error has to be exact, because the sent and the kept part must add up to the value.
The difference of two float32 numbers is exact if both are normal and within a factor of
two, but platforms flush subnormal differences to zero. Magnitudes below 2**-100 are
therefore sent as zero and stay whole with their sender, so no difference is subnormal.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_collectives._sparse_ops import _bits

TINY_BITS = (127 - 100) << 23
_QUIET_BIT = 0x0040


def encoded_magnitude(values: jax.Array) -> jax.Array:
    """The bits of ``|values|`` as ``i32``, 0 for values that are sent as zero."""
    bits = _bits.magnitude_bits(values)
    return jnp.where(bits < TINY_BITS, 0, bits)


def is_negative(values: jax.Array) -> jax.Array:
    """The sign bit, ``bool``, also of a zero or a NaN."""
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32) < 0


def error_of(values: jax.Array, decoded: jax.Array) -> jax.Array:
    """The part of a value that ``decoded`` misses; 0 if the value is not finite."""
    bits = _bits.magnitude_bits(values)
    # Tiny values stay unchanged, because a subtraction may flush them.
    error = jnp.where(bits < TINY_BITS, values, values - decoded)
    return jnp.where(bits >= _bits.INFINITY_BITS, jnp.zeros_like(values), error)


def with_range_of(values: jax.Array, dtype) -> jax.Array:
    """``f32`` as ``dtype``; a finite value out of its range becomes its largest value."""
    largest = np.float32(jnp.finfo(dtype).max)
    return jnp.clip(values, -largest, largest).astype(dtype)


def to_bf16_bits(values: jax.Array) -> jax.Array:
    """The nearest bfloat16 as ``i32`` in [0, 2**16), ties to even; finite values stay finite.

    Args:
      values: float32, bfloat16 or float16. A float16 is also kept in its own
        range, so that the receiver can convert the bfloat16 back.
    """
    magnitude = encoded_magnitude(values)
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    # The largest bfloat16 in the range of the dtype of the values.
    largest = int(np.float32(jnp.finfo(values.dtype).max).view(np.int32)) >> 16
    rounded = jnp.minimum(rounded, largest)
    special = magnitude >> 16
    special = jnp.where(magnitude > _bits.INFINITY_BITS, special | _QUIET_BIT, special)
    pattern = jnp.where(magnitude >= _bits.INFINITY_BITS, special, rounded)
    return pattern | jnp.where(is_negative(values), 0x8000, 0)


def from_bf16_bits(pattern: jax.Array, dtype) -> jax.Array:
    """The inverse of :func:`to_bf16_bits`; higher bits of ``pattern`` are ignored."""
    return lax.bitcast_convert_type(pattern.astype(jnp.int32) << 16, jnp.float32).astype(dtype)


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """``x[..., m]`` as ``[..., ceil(m / block), block]``, padded with zeros."""
    x = _bits.pad_to(x, block)
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def in_one_run(x: jax.Array) -> jax.Array:
    """The inverse of :func:`in_blocks`, but for the padding."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def spread(of_block: jax.Array, block: int, length: int) -> jax.Array:
    """Repeats the number of each block for each of ``length`` values."""
    repeated = jnp.broadcast_to(of_block[..., None], (*of_block.shape, block))
    return in_one_run(repeated)[..., :length]
