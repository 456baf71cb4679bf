"""One word for an entry: a bfloat16 and a gap of 16 bits."""

import jax
import jax.numpy as jnp

from sparse_collectives import _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.wire import _bf16, _gaps, _sizes, _values

_FORMAT = _sizes.GAPS16


def narrow16(*, escapes: float = 1 / 16) -> Codec:
    """Values as bfloat16 and indices as gaps, one word for an entry.

    A message is the first index of its row, followed by one word for each slot: the value in the
    upper 16 bits, and the gap from the previous entry in the lower ones. If the gap is 65,535 or
    more, an escape comes first: a word with the lower bits 65,535, whose upper bits are the
    multiple of 65,535 to move on by. Values are rounded as in :func:`bf16`.

    Args:
      escapes: room for escapes in a message, as a share of its slots (two more are added; unused
        slots serve as well). Entries without room are reported as not sent; which ones these are
        depends on the seed. The default is ample down to a density of about 1/10,000.

    Returns:
      A :class:`Codec`. ``c`` pairs take ``1 + c + min(escapes c + 2, n / 65535 + 1, c - 1)``
      words, and ``m`` dense values ``ceil(m / 2)``. The indices of a row may have any
      order, but each step back takes an escape. Cost: two prefix sums, and a few
      scatters and gathers, of c entries.

    Raises:
      ValueError: ``escapes`` is not in [0, 1].
      TypeError: at ``encode``, values that are not float32, bfloat16 or float16.
    """
    escapes = _validation.check_number("escapes", escapes, 0.0, 1.0)

    def encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
        _validation.check_float("values", coo.values.dtype)
        rows = _gaps.as_rows(coo)
        count = _sizes.narrow16_slots(rows.capacity, coo.size, escapes)
        slots = _gaps.lay_out(rows, count, _FORMAT, seed)
        pattern = _values.to_bf16_bits(rows.values)
        of_slot = _gaps.row_gather(pattern, slots.entry, 0)
        words = ((of_slot | slots.digit) << 16) | slots.code
        message = jnp.concatenate([slots.first[:, None], words], axis=1)
        error = _values.error_of(rows.values, _values.from_bf16_bits(pattern, rows.values.dtype))
        return _gaps.encoded(message, slots, error, coo)

    def decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
        first, words = message[..., 0], message[..., 1:]
        code, digit = words & 0xFFFF, (words >> 16) & 0xFFFF
        indices = _gaps.read(first, code, digit, size, _FORMAT)
        values = _values.from_bf16_bits(jnp.where(indices < size, digit, 0), dtype)
        return PaddedCOO(values, indices, size)

    spec, dense = Spec.of("narrow16", escapes=escapes), (_bf16.encode_dense, _bf16.decode_dense)
    return Codec(encode, decode, *dense, exact=False, spec=spec)
