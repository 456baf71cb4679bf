"""The exact encoding: one word for the value, one for the index."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded


def raw() -> Codec:
    """Values and indices side by side in one integer array, exactly.

    There is one array instead of two, so that an exchange is one collective. A 16-bit
    value takes a 32-bit word, and a 64-bit value takes two; nothing is rounded.

    Returns:
      A :class:`Codec`. ``c`` pairs take ``2 c`` words (``3 c`` in float64). ``m`` dense
      values take ``m`` words, half of that if they have 16 bits, and twice in float64.
    """
    return Codec(_encode, _decode, encode_dense, decode_dense, exact=True, spec=Spec.of("raw"))


def _encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
    del seed
    message = jnp.concatenate([_widened(coo.values), coo.indices], axis=-1)
    return Encoded(message, coo.indices < coo.size, jnp.zeros_like(coo.values))


def _decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
    width = jnp.dtype(dtype).itemsize
    words = message.shape[-1] * width // (width + 4) if width > 4 else message.shape[-1] // 2
    values, indices = message[..., :words], message[..., words:]
    if width == 2:
        values = lax.bitcast_convert_type(values.astype(jnp.uint16), dtype)
    else:
        values = decode_dense(values, indices.shape[-1], dtype)
    return PaddedCOO(values, indices, size)


def encode_dense(values: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    del seed
    error = jnp.zeros_like(values)
    if values.dtype.itemsize == 2:
        odd = values.shape[-1] % 2
        # Pads bits instead of floats: a program that only pads may flush subnormals to zero.
        halves = lax.bitcast_convert_type(values, jnp.uint16)
        halves = jnp.pad(halves, [(0, 0)] * (values.ndim - 1) + [(0, odd)])
        halves = halves.reshape(*halves.shape[:-1], -1, 2)
        return lax.bitcast_convert_type(halves, jnp.int32), error
    return _as_words(values), error


def decode_dense(message: jax.Array, length: int, dtype) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    if width == 8:
        message = message.reshape(*message.shape[:-1], -1, 2)
    if width == 2:
        # Cuts off bits instead of floats: a program that only slices may quiet a NaN.
        halves = lax.bitcast_convert_type(message, jnp.uint16).reshape(*message.shape[:-1], -1)
        return lax.bitcast_convert_type(halves[..., :length], dtype)
    return lax.bitcast_convert_type(message, dtype)[..., :length]


def _widened(values: jax.Array) -> jax.Array:
    if values.dtype.itemsize == 2:
        return lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.int32)
    return _as_words(values)


def _as_words(values: jax.Array) -> jax.Array:
    """One word for each value, or two consecutive ones."""
    words = lax.bitcast_convert_type(values, jnp.int32)
    return words.reshape(*values.shape[:-1], -1) if words.ndim > values.ndim else words
