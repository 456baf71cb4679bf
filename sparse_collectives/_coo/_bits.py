"""Magnitudes as integers, and the bit tricks that selection is built on.

The bit pattern of a non-negative IEEE number, read as an integer, is ordered
like the number itself. Comparing patterns costs what comparing floats costs,
treats subnormals exactly where a CPU would flush them to zero, and puts NaN
above infinity, so that a NaN is selected and seen instead of hiding in a
residual for ever.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAGNITUDE_BITS = 31
# The pattern of infinity: finite magnitudes are below it, NaN above.
INFINITY_BITS = 0x7F800000
_MAGNITUDE_MASK = np.int32(0x7FFFFFFF)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bit pattern of ``|x|`` as ``i32``; bfloat16 and float16 are widened."""
    if x.dtype == jnp.bfloat16:
        # Its bits are the upper half: a conversion may flush subnormals.
        upper = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) << 16
        return upper & _MAGNITUDE_MASK
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & _MAGNITUDE_MASK


def magnitude_from_bits(bits: jax.Array) -> jax.Array:
    """The inverse of :func:`magnitude_bits`, ``f32``."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def pack_mask(mask: jax.Array) -> jax.Array:
    """``bool[32 * w]`` to ``u32[w]``; bit b of word i is entry ``32 i + b``."""
    # Two minor dimensions: XLA's CPU backend then vectorises the reduction and
    # the pass over n runs at the speed of memory (twice that of one dimension).
    weights = (jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)).reshape(4, 8)
    blocks = mask.reshape(-1, 4, 8)
    zero = jnp.uint32(0)
    return jnp.sum(jnp.where(blocks, weights, zero), axis=(1, 2), dtype=jnp.uint32)


def popcount(words: jax.Array) -> jax.Array:
    """The number of set bits of each word, ``i32``."""
    return lax.population_count(words).astype(jnp.int32)


def select_bit(words: jax.Array, rank: jax.Array) -> jax.Array:
    """The position (0 to 31) of the set bit number ``rank`` (from 0) of each word.

    By halving: five steps of a popcount, no table and no loop over bits. Where a
    word has fewer set bits the result is in 0..31 and means nothing.
    """
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = words & jnp.uint32((1 << width) - 1)
        below = popcount(low)
        high = rank >= below
        rank = jnp.where(high, rank - below, rank)
        words = jnp.where(high, words >> width, low)
        position = jnp.where(high, position + width, position)
    return position
