"""The exact encoding: one word for the value, one for the index."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._spec import Spec
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.padded_coo import PaddedCOO


def raw() -> Codec:
    """Values and indices side by side in one integer array, exactly.

    One array rather than two, so that an exchange is one collective. A 16-bit value
    travels in a 32-bit word; nothing is rounded.

    Returns:
      A :class:`Codec`; ``c`` pairs take ``2 c`` words, ``m`` dense values take ``m``, or
      half of that where they have 16 bits.
    """
    return Codec(_encode, _decode, _encode_dense, _decode_dense, exact=True, spec=Spec.of("raw"))


def _encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
    del seed
    message = jnp.concatenate([_widened(coo.values), coo.indices], axis=-1)
    return Encoded(message, coo.indices < coo.size, jnp.zeros_like(coo.values))


def _decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
    values, indices = jnp.split(message, 2, axis=-1)
    if jnp.dtype(dtype).itemsize == 2:
        values = lax.bitcast_convert_type(values.astype(jnp.uint16), dtype)
    else:
        values = lax.bitcast_convert_type(values, dtype)
    return PaddedCOO(values, indices, size)


def _encode_dense(values: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    del seed
    error = jnp.zeros_like(values)
    if values.dtype.itemsize == 2:
        odd = values.shape[-1] % 2
        halves = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, odd)])
        values = halves.reshape(*halves.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(values, jnp.int32), error


def _decode_dense(message: jax.Array, length: int, dtype) -> jax.Array:
    values = lax.bitcast_convert_type(message, dtype)
    if jnp.dtype(dtype).itemsize == 2:
        values = values.reshape(*message.shape[:-1], -1)
    return values[..., :length]


def _widened(values: jax.Array) -> jax.Array:
    if values.dtype.itemsize == 2:
        return lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.int32)
    return lax.bitcast_convert_type(values, jnp.int32)
