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

from sparse_collectives import _hash
from sparse_collectives._coo import _bits
from sparse_collectives.wire import _packing

# Values that share a step, which is sent as one word.
BUCKET = 256
_MANTISSA_BITS = 23
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 1, 254
_SMALLEST_NORMAL = _SMALLEST_EXPONENT << _MANTISSA_BITS


def half(bits: int, workers: int) -> int:
    """The largest integer h of one worker in a field of so many bits; 0 where there is none."""
    return ((1 << bits) - 1) // (2 * workers)


def buckets(slots: int) -> int:
    """Steps of so many values."""
    return -(-slots // BUCKET)


def steps(values: jax.Array, largest: int, turn: jax.Array) -> jax.Array:
    """``f32[buckets]``: a power of two for each bucket, of which values are sent as multiples.

    It is the smallest of which ``largest`` are the largest magnitude of the bucket. Where that
    would round other values to 0, it is at every other turn, as a hash of the turn decides, one
    that suits some of these: a magnitude is drawn from their range, uniformly in its logarithm,
    and the step is made for the largest of them up to it. What is larger is cut at these turns, and
    waits. So a value that is far below the others of its bucket does not wait until it has grown
    to their size, and has probability s / 2 at a turn, with s the share of the range between
    it and the next larger one.

    Not finite for a bucket in which a value isn't.

    Args:
      values: ``f[c]``.
      largest: h, the largest integer of one worker.
      turn: ``u32[]``, another one at each step.
    """
    bits = _bits.magnitude_bits(_packing.pad_to(values.astype(jnp.float32), BUCKET))
    bits = bits.reshape(-1, BUCKET)
    most = jnp.max(bits, axis=1)
    step = _step_of(most, largest)
    # Half a step rounds to 0, and what is subnormal is never sent.
    top = _bits.magnitude_bits(step) - (1 << _MANTISSA_BITS)
    lost = (bits <= top[:, None]) & (bits >= _SMALLEST_NORMAL)
    least = jnp.min(jnp.where(lost, bits, _bits.INFINITY_BITS), axis=1)
    draw = _hash.random_bits(turn, jnp.arange(bits.shape[0], dtype=jnp.int32))
    # Patterns of magnitudes are nearly their logarithms.
    width = jnp.maximum(top - least, 0) + 1
    drawn = least + ((draw >> 1) % width.astype(jnp.uint32)).astype(jnp.int32)
    suited = jnp.max(jnp.where(lost & (bits <= drawn[:, None]), bits, 0), axis=1)
    for_small = (suited > 0) & ((draw & 1) == 0)
    step = jnp.where(for_small, _step_of(suited, largest), step)
    return jnp.where(most < _bits.INFINITY_BITS, step, jnp.nan)


def _step_of(most: jax.Array, largest: int) -> jax.Array:
    """The smallest power of two of which ``largest`` are the magnitude of the pattern ``most``."""
    bits = _bits.magnitude_bits(_bits.magnitude_from_bits(most) / largest)
    up = (bits & ((1 << _MANTISSA_BITS) - 1)) > 0
    exponent = (bits >> _MANTISSA_BITS) + up.astype(jnp.int32)
    exponent = jnp.clip(exponent, _SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    return _bits.magnitude_from_bits(exponent << _MANTISSA_BITS)


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
