"""Codes of values in one bit to eight, with scales for each block of consecutive slots.

With one bit the scale is the mean magnitude of the block, and with two bits the means of the
magnitudes on either side of that. Means make the error of a block smaller than its values, whatever
these are, so that residuals stay bounded (Karimireddy et al., `Error Feedback Fixes SignSGD
<https://arxiv.org/abs/1901.09847>`_, ICML 2019). With more bits codes are multiples of a step, but
for the largest code, which is the largest magnitude of the block. A magnitude far above its block
would make all others too large, or round them to 0. So a mean is one of groups of eight slots, each
of which counts for a few times the mean group at most.

Scales have eight significant bits, so that a multiple of a scale is exact. A program may then round
a product and a sum together or one after the other, as XLA does in some fusions and not in others,
and gives the same bits.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._platform import written
from sparse_collectives._sparse_ops import _bits

# Slots that share their scales.
BLOCK = 256
# Groups of a block, of the slots i, i + 32, ...
_GROUPS = 32
# A group counts up to this multiple of the mean group, and steps reach so many means.
_MOST = 4.0
# So many octaves of an outlier are left out of a mean.
_OCTAVES = 16
_SCALE_BITS = 16


def words(slots: int, bits: int) -> int:
    """Words of the codes of so many slots, with their scales."""
    scales = _scales_of(slots, bits)
    return -(-scales * _SCALE_BITS // 32) + bits * -(-slots // 32)


def encode(
    values: jax.Array, counts: jax.Array, slots: int, bits: int
) -> tuple[jax.Array, jax.Array]:
    """Codes of the first slots of each row, and what they stand for.

    Args:
      values: ``f32[r, b, BLOCK]``, finite, or seen as not finite by all who decode their block.
        Those from the count of a row on are zero, and their codes have no meaning.
      counts: ``i32[r]``.
      slots: a number that takes b blocks.
      bits: of a code.

    Returns:
      ``i32[r, words(slots, bits)]`` and ``f32[r, b, BLOCK]``.
    """
    starts = BLOCK * lax.broadcasted_iota(jnp.int32, values.shape[:2], 1)
    count = jnp.clip(counts[:, None] - starts, 0, BLOCK).astype(jnp.float32)
    magnitude = jnp.abs(values)
    total = _sum_without_outliers(values, count, slots)
    scale = _mean(total, count)
    if bits == 2:
        is_high = magnitude > scale[..., None]
        above = _bits.sum_of(_above, values, scale)
        # All of these are below the scale, so none is an outlier.
        below = _bits.sum_of(_below, values, scale)
        high = jnp.maximum(scale, _mean(total - below, above))
        scales = [_rounded(_mean(below, count - above)), _rounded(high)]
        code = is_high.astype(jnp.int32) | (_is_negative(values) << 1)
    elif bits == 1:
        scales, code = [_rounded(scale)], _is_negative(values)
    else:
        most, largest = (1 << (bits - 1)) - 1, jnp.max(magnitude, axis=-1)
        step = _rounded(jnp.minimum(_MOST * scale, largest) / most)
        scales = [step, _rounded(largest)]
        step, largest = (x[..., None] for x in scales)
        multiple = jnp.round(magnitude / jnp.where(step > 0, step, 1.0))
        multiple = jnp.where(jnp.isnan(multiple), 0, jnp.minimum(multiple, most - 1))
        is_largest = magnitude - multiple * step > largest - magnitude
        multiple = jnp.where(is_largest, most, multiple).astype(jnp.int32)
        code = jnp.where(values < 0, -multiple, multiple) + most
    rows = code.shape[0]
    planes = _bits.pack_planes(code.reshape(rows, -1), bits).reshape(rows, bits, -1)
    planes = planes[..., : -(-slots // 32)].reshape(rows, -1)
    packed = _bits.pack(_upper_half(jnp.concatenate(scales, axis=-1)), _SCALE_BITS)
    arrives = _values(code, [x[..., None] for x in scales], bits)
    return jnp.concatenate([packed, planes], axis=-1), arrives


def decode(message: jax.Array, slots: int, bits: int) -> jax.Array:
    """What the codes of :func:`encode` stand for, ``f32[r, b, BLOCK]``."""
    rows, count = message.shape[0], _scales_of(slots, bits)
    words_of_scales = -(-count * _SCALE_BITS // 32)
    halves = _bits.unpack(message[:, :words_of_scales], _SCALE_BITS)[:, :count]
    scales = lax.bitcast_convert_type(halves << _SCALE_BITS, jnp.float32)
    planes = message[:, words_of_scales:].reshape(rows, bits, -1)

    def decoded(planes: jax.Array, scales: jax.Array) -> jax.Array:
        # A code for each bit of a word, so that a CPU divides no index.
        planes = _bits.pad_to(planes, BLOCK // 32)
        each = (_bits.unpack_words(planes[:, bit], 1) << bit for bit in range(bits))
        code = functools.reduce(operator.or_, each)
        parts = jnp.split(scales, 1 if bits == 1 else 2, axis=-1)
        parts = [jnp.repeat(x, BLOCK // 32, axis=-1)[..., None] for x in parts]
        return _values(code, parts, bits)

    return written(decoded, planes, scales).reshape(rows, -1, BLOCK)


def _values(code: jax.Array, scales: list[jax.Array], bits: int) -> jax.Array:
    first, *second = scales
    if bits > 2:
        most = (1 << (bits - 1)) - 1
        multiple = code - most
        inner = multiple.astype(jnp.float32) * first
        return jnp.where(jnp.abs(multiple) < most, inner, jnp.sign(inner) * second[0])
    magnitude = first if bits == 1 else jnp.where((code & 1) > 0, second[0], first)
    return jnp.where(code >> (bits - 1) > 0, -magnitude, magnitude)


def _scales_of(slots: int, bits: int) -> int:
    return -(-slots // BLOCK) * (1 if bits == 1 else 2)


def _sum_without_outliers(values: jax.Array, count: jax.Array, slots: int) -> jax.Array:
    """The sum of each block over ``BLOCK``, ``f32[r, b]``, without far larger magnitudes.

    Args:
      values: ``f32[r, b, BLOCK]``, of which all but ``count`` are zero.
      count: ``f32[r, b]``.
      slots: of a row.
    """
    # In a short block an outlier has a large share of the mean.
    most = min(_MOST, max(1.25, slots / 4))
    # Each turn divides the share of a single outlier by this.
    octaves = math.log2(max(1.1, min(slots, _GROUPS) / most))
    share = most / jnp.clip(count, 1, _GROUPS)

    def groups(values: jax.Array) -> jax.Array:
        # Divided first, because the sum may overflow.
        return _bits.by_halves(operator.add, jnp.abs(values) / BLOCK, _GROUPS)

    each = written(groups, values)
    found = _bits.sum_by_halves(each)
    for _ in range(min(10, math.ceil(_OCTAVES / octaves))):
        found = _bits.sum_by_halves(jnp.minimum(each, (share * found)[..., None]))
    return found


def _above(values: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(values) > scale[..., None], 1.0, 0.0)


def _below(values: jax.Array, scale: jax.Array) -> jax.Array:
    magnitude = jnp.abs(values)
    return jnp.where(magnitude > scale[..., None], 0.0, magnitude / BLOCK)


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """The mean of so many magnitudes, whose sum is ``BLOCK`` times the total."""
    return total * (BLOCK / jnp.maximum(count, 1))


def _is_negative(values: jax.Array) -> jax.Array:
    """The sign bit, ``i32``; a zero has either sign, so that zeros do not add up."""
    odd = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1) & 1 > 0
    return ((values < 0) | ((values == 0) & odd)).astype(jnp.int32)


def _rounded(scale: jax.Array) -> jax.Array:
    return scale.astype(jnp.bfloat16).astype(jnp.float32)


def _upper_half(scale: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(scale, jnp.int32) >> _SCALE_BITS & 0xFFFF
