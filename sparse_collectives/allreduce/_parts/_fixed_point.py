"""Sums of numbers of a few bits, exact in any order and with any collective that adds integers.

All workers round their values to multiples of one step, a power of two that they have
agreed on for each bucket of values. A field of b bits holds the sum of P of them: each
worker adds an integer in [0, 2h] with h = (2**b - 1) // 2P, which stands for one in
[-h, h]. Fields never carry into each other, so that several make one word, and a psum of
words adds them all up. A worker knows by itself what rounding and clipping took off its
values, to the last bit, and nobody rounds anything on the way.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._coo import _bits
from sparse_collectives.wire import _packing

# Values that share a step, which is sent as one word.
BUCKET = 256
_MANTISSA_BITS = 23
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 1, 254


def half(bits: int, workers: int) -> int:
    """The largest integer h of one worker in a field of so many bits; 0 where there is none."""
    return ((1 << bits) - 1) // (2 * workers)


def buckets(slots: int) -> int:
    """Steps of so many values."""
    return -(-slots // BUCKET)


def steps(values: jax.Array, largest: int) -> jax.Array:
    """``f32[buckets]``: the smallest power of two of which ``largest`` are the largest magnitude.

    Not finite for a bucket in which a value isn't.
    """
    magnitudes = jnp.abs(_packing.pad_to(values.astype(jnp.float32), BUCKET))
    most = jnp.max(magnitudes.reshape(-1, BUCKET), axis=1)
    bits = _bits.magnitude_bits(most / largest)
    up = (bits & ((1 << _MANTISSA_BITS) - 1)) > 0
    exponent = (bits >> _MANTISSA_BITS) + up.astype(jnp.int32)
    exponent = jnp.clip(exponent, _SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    step = _bits.magnitude_from_bits(exponent << _MANTISSA_BITS)
    return jnp.where(jnp.isfinite(most), step, jnp.nan)


def of_slots(step: jax.Array, slots: int) -> jax.Array:
    """The step of each of ``slots`` values, ``f32[..., slots]``."""
    return jnp.repeat(step, BUCKET, axis=-1)[..., :slots]


def rounded(values: jax.Array, step: jax.Array, largest: int) -> jax.Array:
    """The integers ``i32[...]`` in [-largest, largest] nearest to ``values / step``.

    0 where that is not a number; the step is then no number either, or the value waits.
    """
    # A power of two: the quotient is exact, unless it is too large or too small to matter.
    multiple = jnp.clip(jnp.round(values.astype(jnp.float32) / step), -largest, largest)
    return jnp.where(jnp.isnan(multiple), 0, multiple).astype(jnp.int32)


def pack(integers: jax.Array, largest: int, bits: int) -> jax.Array:
    """``i32[c]`` in [-largest, largest] as words to be added up."""
    return _packing.pack(integers + largest, bits)


def unpack(words: jax.Array, slots: int, largest: int, bits: int, workers: int) -> jax.Array:
    """The sums ``i32[slots]`` of the integers of all workers."""
    return _packing.unpack(words, bits)[:slots] - workers * largest


def as_words(step: jax.Array) -> jax.Array:
    """Steps as words of a message."""
    return lax.bitcast_convert_type(step, jnp.int32)


def from_words(words: jax.Array) -> jax.Array:
    """The inverse of :func:`as_words`."""
    return lax.bitcast_convert_type(words, jnp.float32)
