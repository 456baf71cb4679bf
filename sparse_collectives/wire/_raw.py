"""The exact encoding: one word for the value, one for the index."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._types import Codec
from sparse_collectives.padded_coo import PaddedCOO


def raw() -> Codec:
    """Values and indices side by side in one integer array, exactly.

    One array and not two, so that an exchange is one collective. A 16-bit value
    travels in a 32-bit word; nothing is rounded.

    Returns:
      A :class:`Codec`; ``c`` pairs take ``2 c`` words.
    """
    return Codec(_encode, _decode)


def _encode(coo: PaddedCOO) -> jax.Array:
    values = coo.values
    if values.dtype.itemsize == 2:
        words = lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.int32)
    else:
        words = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([words, coo.indices], axis=-1)


def _decode(words: jax.Array, size: int, dtype) -> PaddedCOO:
    values, indices = jnp.split(words, 2, axis=-1)
    if jnp.dtype(dtype).itemsize == 2:
        values = lax.bitcast_convert_type(values.astype(jnp.uint16), dtype)
    else:
        values = lax.bitcast_convert_type(values, dtype)
    return PaddedCOO(values, indices, size)
