"""Half a word for an entry: a value of 8 bits and a gap of 8 bits."""

import jax
import jax.numpy as jnp

from sparse_collectives import _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.wire import _gaps, _log8, _sizes, _values

_FORMAT = _sizes.GAPS8


def narrow8(*, block: int = 128, escapes: float = 1 / 8) -> Codec:
    """Values as a level of their block and indices as gaps, half a word for an entry.

    A value is a sign and one of 126 levels, nearly logarithmic, between the
    extremes of its block of consecutive slots (the module :mod:`._log8` explains
    why). With a range of q octaves in a block, the error is at most 0.4 q % of a
    value and never over 6.5 %. Zeros are exact. A value below 2**-16 of the largest
    value of its block may be sent as zero. A value that is not finite arrives as NaN.

    A message is the first index of its row; one word for each block (the upper
    halves of the float32 of its lowest level and of one above its highest); and
    two slots to a word, the first in the lower half. A slot is the value in the
    upper 8 bits and the gap in the lower ones. Gaps of 253 or more take up to three
    more slots, the escapes, with the codes 253, 254 and 255 and 8 bits of gap // 253
    each, the lowest digit nearest to the entry.

    Args:
      block: the number of slots that share their levels, a multiple of 4.
      escapes: room for escapes in a message, as a share of its slots (six more are
        added; unused slots serve as well). Entries without room are reported as not
        sent; which ones these are depends on the seed. The default is for densities
        of about 1 % and more. At 0.3 %, half of the entries need an escape, and
        below that :func:`narrow16` takes fewer words.

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
        codes, scales = _log8.encode(of_slot, block)
        words = _bits.pack(((codes | slots.digit) << 8) | slots.code, 16)
        message = jnp.concatenate([slots.first[:, None], scales, words], axis=1)
        decoded = _log8.decode(codes, scales, block, rows.values.dtype)
        decoded = _gaps.row_gather(decoded, slots.place, 0)
        sent = slots.place < count
        return _gaps.encoded(message, sent, _values.error_of(rows.values, decoded), coo)

    def decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
        pairs = _sizes.slots_of(
            message.shape[-1] - 1, lambda p: p + _sizes.block_scales(2 * p, block)
        )
        split = message.shape[-1] - pairs
        words = _bits.unpack(message[..., split:], 16)
        code, byte = words & 0xFF, words >> 8
        indices = _gaps.read(message[..., 0], code, byte, size, _FORMAT)
        values = _log8.decode(byte, message[..., 1:split], block, dtype)
        return PaddedCOO(jnp.where(indices < size, values, 0), indices, size)

    def encode_dense(values: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        del seed
        _validation.check_float("values", values.dtype)
        codes, scales = _log8.encode(values, block)
        decoded = _log8.decode(codes, scales, block, values.dtype)
        message = jnp.concatenate([scales, _bits.pack(codes, 8)], axis=-1)
        return message, _values.error_of(values, decoded)

    def decode_dense(message: jax.Array, length: int, dtype) -> jax.Array:
        split = _sizes.block_scales(length, block)
        codes = _bits.unpack(message[..., split:], 8)[..., :length]
        return _log8.decode(codes, message[..., :split], block, dtype)

    return Codec(
        encode,
        decode,
        encode_dense,
        decode_dense,
        exact=False,
        spec=Spec.of("narrow8", block=block, escapes=escapes),
    )
