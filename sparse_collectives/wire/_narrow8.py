"""Half a word for an entry: a value of 8 bits and a gap of 8 bits.

A value is a sign, and a level between the extremes of a block. The levels are equally spaced
between the bit patterns of the smallest and the largest magnitude of the block. A bit pattern is,
within 9 %, the logarithm of its number, so the relative error is nearly the same for all entries.
All arithmetic is with integers, which gives the same bits on every platform.

The values of a top-k selection all lie above a threshold, and most of them near it, so levels
between 0 and the maximum leave most of their range unused. The table has the error for the largest
1 % of 4 million numbers: the root mean square of the errors relative to the root mean square of the
values, and in brackets the mean of the entries' relative errors.

===============  ==============  =============  =============
distribution     0 to max        min to max     this module
===============  ==============  =============  =============
normal           0.32 (0.32) %   0.12 (0.12) %  0.12 (0.12) %
Laplace          0.40 (0.43) %   0.23 (0.24) %  0.19 (0.20) %
Student, 3 d.f.  1.12 (1.53) %   1.04 (1.41) %  0.54 (0.45) %
lognormal, s=2   1.91 (6.16) %   1.81 (5.33) %  0.86 (0.78) %
Cauchy           0.39 (52.5) %   0.36 (27.9) %  1.57 (1.43) %
===============  ==============  =============  =============

In the last row, a few outliers dominate the sum of squares.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.wire import _gaps, _sizes, _values

_FORMAT = _sizes.GAPS8
# Codes: 0 for zero, 1 to 126 for the levels, 127 for a value that is not finite.
_STEPS = 125
_NOT_FINITE = 127
# 2**16 / _STEPS, rounded up, so that the last level is not below the maximum.
_STEP_UNIT = 525
# A block keeps 16 octaves, because values far below its maximum must not reduce the
# precision of the others. The unit is 2**16 in a bit pattern; 128 units are an octave.
_RANGE = 16 * 128
_OCTAVE_BITS = 1 << 23
_LARGEST_BITS = _bits.INFINITY_BITS - 1


def narrow8(*, block: int = 128, escapes: float = 1 / 8) -> Codec:
    """Values as a level of their block and indices as gaps, half a word for an entry.

    A value is a sign and one of 126 levels, nearly logarithmic, between the extremes of its block
    of consecutive slots. With a range of q octaves in a block, the error is at most 0.4 q % of a
    value and never over 6.5 %. Zeros are exact. A value below 2**-16 of the largest
    value of its block may be sent as zero. A value that is not finite arrives as NaN.

    A message is the first index of its row; one word for each block (the upper halves of the
    float32 of its lowest level and of one above its highest); and two slots to a word, the first in
    the lower half. A slot is the value in the upper 8 bits and the gap in the lower ones. Gaps of
    253 or more take up to three more slots, the escapes, with the codes 253, 254 and 255 and 8 bits
    of gap // 253 each, the lowest digit nearest to the entry.

    Args:
      block: the number of slots that share their levels, a multiple of 4.
      escapes: room for escapes in a message, as a share of its slots (six more are added; unused
        slots serve as well). Entries without room are reported as not sent; which ones these are
        depends on the seed. The default is for densities of about 1 % and more. At 0.3 %, half of
        the entries need an escape, and below that :func:`narrow16` takes fewer words.

    Returns:
      A :class:`Codec`. ``c`` pairs take about ``c (1 + escapes) (1 / 2 + 1 / block)``
      words, and ``m`` dense values ``m (1 / 4 + 1 / block)``. The indices of a row may
      have any order, but each step back takes up to three escapes. Cost: two prefix
      sums, four scatters and a few gathers of c entries.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: at ``encode``, values that are not float32, bfloat16 or float16.
    """
    block = _validation.check_positive_int("block", block, minimum=4)
    if block % 4:
        raise ValueError(f"block must be a multiple of 4, got {block}: four values fill a word.")
    escapes = _validation.check_number("escapes", escapes, 0.0, 1.0)

    def encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
        _validation.check_float("values", coo.values.dtype)
        rows = _gaps.as_rows(coo)
        count = _sizes.narrow8_slots(rows.capacity, coo.size, escapes)
        slots = _gaps.lay_out(rows, count, _FORMAT, seed)
        of_slot = _gaps.row_gather(rows.values, slots.entry, 0)
        codes, scales = _quantized(of_slot, block)
        words = _bits.pack(((codes | slots.digit) << 8) | slots.code, 16)
        message = jnp.concatenate([slots.first[:, None], scales, words], axis=1)
        decoded = _dequantized(codes, scales, block, rows.values.dtype)
        decoded = _gaps.row_gather(decoded, slots.place, 0)
        return _gaps.encoded(message, slots, _values.error_of(rows.values, decoded), coo)

    def decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
        pairs = _sizes.slots_of(
            message.shape[-1] - 1, lambda p: p + _sizes.block_scales(2 * p, block)
        )
        split = message.shape[-1] - pairs
        words = _bits.unpack(message[..., split:], 16)
        code, byte = words & 0xFF, words >> 8
        indices = _gaps.read(message[..., 0], code, byte, size, _FORMAT)
        values = _dequantized(byte, message[..., 1:split], block, dtype)
        return PaddedCOO(jnp.where(indices < size, values, 0), indices, size)

    def encode_dense(values: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        del seed
        _validation.check_float("values", values.dtype)
        codes, scales = _quantized(values, block)
        decoded = _dequantized(codes, scales, block, values.dtype)
        message = jnp.concatenate([scales, _bits.pack(codes, 8)], axis=-1)
        return message, _values.error_of(values, decoded)

    def decode_dense(message: jax.Array, length: int, dtype) -> jax.Array:
        split = _sizes.block_scales(length, block)
        codes = _bits.unpack(message[..., split:], 8)[..., :length]
        return _dequantized(codes, message[..., :split], block, dtype)

    spec = Spec.of("narrow8", block=block, escapes=escapes)
    return Codec(encode, decode, encode_dense, decode_dense, exact=False, spec=spec)


def _quantized(values: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Quantizes blocks of consecutive values.

    Args:
      values: ``f[..., m]``; zeros do not count for the range of their block.
      block: static length of a block.

    Returns:
      ``i32[..., m]`` in [0, 256), and one word for each block: its lowest level and
      its highest, as the upper halves of their bit patterns.
    """
    length = values.shape[-1]
    magnitude = _values.encoded_magnitude(values)
    finite = magnitude < _bits.INFINITY_BITS
    used = _values.in_blocks(jnp.where(finite, magnitude, 0), block)
    largest = jnp.max(used, axis=-1)
    smallest = jnp.min(jnp.where(used > 0, used, largest[..., None]), axis=-1)
    high = jnp.where(largest > 0, (largest >> 16) + 1, 0)
    low = jnp.where(largest > 0, jnp.maximum(smallest >> 16, high - _RANGE), 0)
    scales = (low << 16) | high

    base, step = (_values.spread(x, block, length) for x in _levels(scales))
    step = jnp.maximum(step, 1)
    level = jnp.clip((magnitude - base + step // 2) // step, 0, _STEPS)
    # Nearer to zero than to the lowest level.
    is_zero = magnitude < base - _OCTAVE_BITS
    code = jnp.where(is_zero | (magnitude == 0), 0, 1 + level)
    code = jnp.where(finite, code, _NOT_FINITE)
    return code | jnp.where(_values.is_negative(values), 128, 0), scales


def _dequantized(codes: jax.Array, scales: jax.Array, block: int, dtype) -> jax.Array:
    """The inverse of :func:`_quantized`, ``f[..., m]``; a value that was not finite is NaN."""
    base, step = (_values.spread(x, block, codes.shape[-1]) for x in _levels(scales))
    level = codes & 127
    # At most 125 * 525 * 0x7F80 above a base of at most 0x7F7F << 16, below 2**31.
    number = _as_float(base + (level - 1) * step)
    number = jnp.where(level == 0, 0.0, number)
    number = _values.with_range_of(number, dtype)
    number = jnp.where(level == _NOT_FINITE, jnp.asarray(jnp.nan, dtype), number)
    return jnp.where(codes >= 128, -number, number)


def _levels(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bit pattern of a block's lowest level, and the step from one level to the next."""
    low, high = (scales >> 16) & 0xFFFF, scales & 0xFFFF
    return low << 16, (high - low) * _STEP_UNIT


def _as_float(pattern: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.minimum(pattern, _LARGEST_BITS), jnp.float32)
