"""Values in two bits: a sign, and one of two levels of their block."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.wire import _gaps, _sizes, _values
from sparse_collectives.wire._narrow8 import narrow8


def two_bits(*, gap_bits: int = 12, block: int = 128, escapes: float = 1 / 16) -> Codec:
    """Values as one of four numbers and indices as gaps, 14 or 10 bits for an entry.

    A value is a sign and one of two levels: the means of the smaller and of the larger magnitudes
    in its block of consecutive slots. The block is split at its mean first, and then in the middle
    between the two means. No error is larger than its value. A value below half of the lower level
    of its block is not sent, because it would arrive as more than twice its size; zeros are never
    sent. A value that is not finite arrives as NaN. The codec is for selections with error
    feedback, which keeps the errors.

    A message is the first index of its row; one word for each block (the upper halves of the
    float32 of its levels, the higher one in the upper half); and for each 16 slots the lower 8 bits
    of their codes, the upper 4 bits if codes have 12, and 2 bits of value. A code is a gap, an
    escape with a digit of a longer gap, or a mark that the value of the next slot is not finite;
    the 2 bits of an escape number its digit. Dense runs are encoded as in :func:`narrow8`.

    Args:
      gap_bits: the bits of a code. 12, the default, holds gaps up to 3,070 and is for densities
        down to 0.1 %; 8 holds gaps up to 190, for densities of 2 % and more.
      block: the number of slots that share their levels, a multiple of 16.
      escapes: room for escapes in a message, as a share of its slots (eight more are added).
        Entries without room are reported as not sent; which ones these are depends on the seed.

    Returns:
      A :class:`Codec`. ``c`` pairs take about ``c (1 + escapes) ((gap_bits + 2) / 32 + 1 / block)``
      words. Cost: as :func:`narrow8`, and eight reductions of blocks.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: at ``encode``, values that are not float32, bfloat16 or float16.

    References:
      Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025: values of 2 bits and
      indices of 12 within chunks of 4,096. Gaps need no chunks.
    """
    if isinstance(gap_bits, bool) or gap_bits not in _sizes.GAPS_OF_BITS:
        raise ValueError(f"gap_bits must be 8 or 12, got {gap_bits!r}.")
    block = _validation.check_positive_int("block", block, minimum=16)
    if block % 16:
        raise ValueError(f"block must be a multiple of 16, got {block}: 16 values fill a word.")
    escapes = _validation.check_number("escapes", escapes, 0.0, 1.0)
    form = _sizes.GAPS_OF_BITS[gap_bits]
    dense = narrow8()

    def encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
        _validation.check_float("values", coo.values.dtype)
        rows = _gaps.as_rows(coo)
        rows = PaddedCOO(rows.values, _worth(rows, block), rows.size)
        count = _sizes.two_bits_slots(rows.capacity, escapes)
        bad = _bits.magnitude_bits(rows.values) >= _bits.INFINITY_BITS
        slots = _gaps.lay_out(rows, count, form, seed, bad)
        of_slot = _gaps.row_gather(rows.values, slots.entry, 0)
        levels = _levels(of_slot, block)
        value = _nearest(of_slot, levels, block)
        number = slots.code - form.base
        is_escape = number >= 0
        code = jnp.where(is_escape, form.base + slots.digit, slots.code)
        code = jnp.where(number == form.digits, (1 << gap_bits) - 1, code)
        value = jnp.where(is_escape, number % form.digits, value)
        parts = [slots.first[:, None], levels, _bits.pack(code & 0xFF, 8)]
        parts += [_bits.pack(code >> 8, 4)] if gap_bits == 12 else []
        message = jnp.concatenate([*parts, _bits.pack(value, 2)], axis=1)
        decoded = _decoded(value, levels, block, rows.values.dtype)
        decoded = _gaps.row_gather(decoded, slots.place, 0)
        return _gaps.encoded(message, slots, _values.error_of(rows.values, decoded), coo)

    def decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
        sixteens = _sizes.slots_of(
            message.shape[-1], lambda s: _sizes.two_bits_words(16 * s, gap_bits, block)
        )
        slots = 16 * sixteens
        ends = [1, _sizes.block_scales(slots, block), slots // 4, slots // 16 * (gap_bits - 8) // 2]
        first, levels, low, high, values = jnp.split(
            message, list(itertools.accumulate(ends)), axis=-1
        )
        code, value = _bits.unpack(low, 8), _bits.unpack(values, 2)
        if gap_bits == 12:
            code |= _bits.unpack(high, 4) << 8
        digit = code - form.base
        is_mark = code == (1 << gap_bits) - 1
        number = jnp.where(is_mark, form.digits, value)
        digit = jnp.where(is_mark, 0, digit)
        code = jnp.where(code < form.base, code, form.base + number)
        indices = _gaps.read(first[..., 0], code, digit, size, form)
        decoded = _decoded(value, levels, block, dtype)
        before = jnp.pad(is_mark[..., :-1], [(0, 0)] * (is_mark.ndim - 1) + [(1, 0)])
        decoded = jnp.where(before, jnp.asarray(jnp.nan, dtype), decoded)
        return PaddedCOO(jnp.where(indices < size, decoded, 0), indices, size)

    spec = Spec.of("two_bits", gap_bits=gap_bits, block=block, escapes=escapes)
    return Codec(encode, decode, dense.encode_dense, dense.decode_dense, exact=False, spec=spec)


def _worth(rows: PaddedCOO, block: int) -> jax.Array:
    """The indices, with n for zeros and for values far below their neighbors."""
    magnitude = _magnitudes(rows.values, rows.indices < rows.size)
    low = _values.spread(
        _halves(_values.in_blocks(magnitude, block))[0], block, magnitude.shape[-1]
    )
    bad = _bits.magnitude_bits(rows.values) >= _bits.INFINITY_BITS
    waits = (magnitude == 0) | (2 * magnitude < low)
    return jnp.where(waits & ~bad, rows.size, rows.indices)


def _levels(values: jax.Array, block: int) -> jax.Array:
    """Two levels of each block as one word; the lower one at most twice the smallest magnitude."""
    magnitude = _values.in_blocks(_magnitudes(values, jnp.ones(values.shape, jnp.bool_)), block)
    low, high = _halves(magnitude)
    least = jnp.min(jnp.where(magnitude > 0, magnitude, jnp.inf), axis=-1)
    # Rounded down to bfloat16, so that no error is larger than its value.
    low = lax.bitcast_convert_type(jnp.minimum(low, 2 * least), jnp.int32) >> 16
    high = lax.bitcast_convert_type(high, jnp.int32) & ~0xFFFF
    return high | low


def _halves(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The means ``f32[..., b]`` of the smaller and the larger magnitudes of ``f32[..., b, l]``."""
    used = magnitude > 0
    scale = jnp.max(magnitude, axis=-1, keepdims=True)
    scaled = magnitude / jnp.where(scale > 0, scale, 1.0)

    def mean(where: jax.Array) -> jax.Array:
        where &= used
        count = jnp.sum(where, axis=-1, keepdims=True, dtype=jnp.float32)
        total = jnp.sum(jnp.where(where, scaled, 0.0), axis=-1, keepdims=True)
        return total / jnp.maximum(count, 1)

    def on_either_side(edge: jax.Array) -> tuple[jax.Array, jax.Array]:
        low = mean(scaled <= edge)
        # If all are equal, none is larger.
        return low, jnp.maximum(low, mean(scaled > edge))

    low, high = on_either_side(mean(used))
    low, high = on_either_side((low + high) / 2)
    low, high = (jnp.minimum(x, 1.0) * scale for x in (low, high))
    return low[..., 0], high[..., 0]


def _nearest(values: jax.Array, levels: jax.Array, block: int) -> jax.Array:
    """The two bits of each value: whether it is negative, and whether it has the higher level."""
    low, high = (_values.spread(x, block, values.shape[-1]) for x in _numbers(levels))
    magnitude = jnp.abs(values.astype(jnp.float32))
    # Half of both, because their sum may overflow.
    is_high = magnitude > low / 2 + high / 2
    return is_high.astype(jnp.int32) | (_values.is_negative(values).astype(jnp.int32) << 1)


def _decoded(value: jax.Array, levels: jax.Array, block: int, dtype) -> jax.Array:
    low, high = (_values.spread(x, block, value.shape[-1]) for x in _numbers(levels))
    number = _values.with_range_of(jnp.where((value & 1) > 0, high, low), dtype)
    return jnp.where(value >= 2, -number, number)


def _numbers(levels: jax.Array) -> tuple[jax.Array, jax.Array]:
    low = lax.bitcast_convert_type(levels << 16, jnp.float32)
    return low, lax.bitcast_convert_type(levels & ~0xFFFF, jnp.float32)


def _magnitudes(values: jax.Array, where: jax.Array) -> jax.Array:
    """``f32``, 0 for padding and for values that are tiny or not finite."""
    bits = _values.encoded_magnitude(values)
    return _bits.magnitude_from_bits(jnp.where(where & (bits < _bits.INFINITY_BITS), bits, 0))
