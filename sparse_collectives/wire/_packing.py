"""Several short integers in one word, and how many slots a message has."""

import bisect
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """``i32[..., m]`` in [0, 2**bits) to ``i32[..., ceil(m * bits / 32)]``.

    The first code is in the lowest bits. Missing codes of the last word are 0.
    """
    each = 32 // bits
    words = pad_to(codes, each).astype(jnp.uint32)
    words = words.reshape(*codes.shape[:-1], words.shape[-1] // each, each)
    shifts = _shifts(words.ndim, bits)
    # The codes don't overlap, so the sum is their union.
    return lax.bitcast_convert_type(jnp.sum(words << shifts, axis=-1, dtype=jnp.uint32), jnp.int32)


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """``i32[..., w]`` to ``i32[..., w * 32 // bits]``, the inverse of :func:`pack`."""
    each = 32 // bits
    codes = lax.bitcast_convert_type(words, jnp.uint32)[..., None]
    codes = codes >> _shifts(codes.ndim, bits)
    codes = codes & jnp.uint32((1 << bits) - 1)
    return codes.astype(jnp.int32).reshape(*words.shape[:-1], words.shape[-1] * each)


def _shifts(ndim: int, bits: int) -> jax.Array:
    """Where the codes of a word begin, ``u32[1, ..., 32 // bits]``."""
    shifts = bits * jnp.arange(32 // bits, dtype=jnp.uint32)
    return lax.expand_dims(shifts, range(ndim - 1))


def pad_to(x: jax.Array, multiple: int, fill: int | float = 0) -> jax.Array:
    """``x`` with its last axis filled up to a multiple."""
    missing = -x.shape[-1] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    return jnp.pad(x, widths, constant_values=fill)


def slots_of(words: int, words_for: Callable[[int], int]) -> int:
    """How many slots a message of ``words`` words has.

    Args:
      words: of one message.
      words_for: the words for so many slots; strictly increasing.

    Raises:
      ValueError: no number of slots takes so many words.
    """
    slots = bisect.bisect_left(range(32 * words + 1), words, key=words_for)
    if words_for(slots) != words:
        raise ValueError(
            f"message has {words} words in a row, which this codec never makes. Decode it with the "
            "codec, and the options, that encoded it."
        )
    return slots
