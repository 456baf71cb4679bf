"""Values in 16 bits, indices in 32."""

import jax
import jax.numpy as jnp

from sparse_collectives import _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.wire import _sizes, _values


def bf16() -> Codec:
    """Values as bfloat16, two to a word, and unchanged indices.

    Values are rounded to nearest, ties to even, so the error of a value is at most
    2**-8 of it. Finite values stay finite, infinities and NaN stay as they are, and
    magnitudes below 2**-100 are sent as zero.

    A message is the values, the first of a pair in the lower half of its word,
    followed by the indices.

    Returns:
      A :class:`Codec`. ``c`` pairs take ``c + ceil(c / 2)`` words, and ``m`` dense
      values ``ceil(m / 2)``. Cost: a few operations for each entry.

    Raises:
      TypeError: at ``encode``, values that are not float32, bfloat16 or float16.
    """
    return Codec(_encode, _decode, encode_dense, decode_dense, exact=False, spec=Spec.of("bf16"))


def _encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
    values, error = encode_dense(coo.values, seed)
    sent = coo.indices < coo.size
    return Encoded(jnp.concatenate([values, coo.indices], axis=-1), sent, jnp.where(sent, error, 0))


def _decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
    slots = _sizes.slots_of(message.shape[-1], _sizes.bf16_pairs)
    split = message.shape[-1] - slots
    values = decode_dense(message[..., :split], slots, dtype)
    return PaddedCOO(values, message[..., split:], size)


def encode_dense(values: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``f[..., m]`` to ``i32[..., ceil(m / 2)]``, and the error."""
    del seed
    _validation.check_float("values", values.dtype)
    pattern = _values.to_bf16_bits(values)
    decoded = _values.from_bf16_bits(pattern, values.dtype)
    return _bits.pack(pattern, 16), _values.error_of(values, decoded)


def decode_dense(message: jax.Array, length: int, dtype) -> jax.Array:
    """The inverse of :func:`encode_dense`, ``f[..., length]``."""
    return _values.from_bf16_bits(_bits.unpack(message, 16)[..., :length], dtype)
