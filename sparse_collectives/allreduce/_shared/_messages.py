"""How long a message is, and what of its entries the receivers will not see."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import padded_coo
from sparse_collectives._types import Codec, Encoded
from sparse_collectives.padded_coo import PaddedCOO


def pair_words(codec: Codec, slots: int, size: int, dtype) -> int:
    """Words of a message of ``slots`` value-index pairs of a vector of length ``size``."""
    message = jax.eval_shape(
        lambda: codec.encode(padded_coo.empty(size, slots, dtype), jnp.uint32(0)).message
    )
    return message.size


def dense_words(codec: Codec, length: int, dtype) -> int:
    """Words of a message of ``length`` dense values."""
    message, _ = jax.eval_shape(
        lambda: codec.encode_dense(jnp.zeros((length,), dtype), jnp.uint32(0))
    )
    return message.size


def useful_words(words: jax.Array | float, entries: jax.Array, slots: int) -> jax.Array:
    """What of so many words sent is no padding, ``f32[]``, with ``entries`` in ``slots``."""
    return jnp.float32(words) * entries.astype(jnp.float32) / float(max(1, slots))


class Words(NamedTuple):
    """What an exchange moves, in words of 4 bytes.

    Attributes:
      received: ``f32[]``, by each worker, padding included; equal on all workers.
      useful: ``f32[]``, sent by this worker, without padding.
    """

    received: jax.Array
    useful: jax.Array


def no_words() -> Words:
    """Of no exchange."""
    return Words(jnp.float32(0), jnp.float32(0))


def words_in_full(received: jax.Array | float) -> Words:
    """Of messages without padding."""
    words = jnp.asarray(received, jnp.float32)
    return Words(words, words)


def words_of_pairs(received: float, entries: jax.Array, slots: int) -> Words:
    """Of messages of value-index pairs: this worker sent ``entries`` in ``slots``."""
    return Words(jnp.float32(received), useful_words(received, entries, slots))


def words_in_all(*parts: Words) -> Words:
    """Of several exchanges together."""
    return functools.reduce(lambda a, b: Words(a.received + b.received, a.useful + b.useful), parts)


def to_others(sent: jax.Array, me: jax.Array) -> jax.Array:
    """Entries in the blocks ``bool[P, c]`` for all workers but ``me``, ``i32[]``."""
    counts = jnp.sum(sent, axis=1, dtype=jnp.int32)
    return jnp.sum(counts, dtype=jnp.int32) - counts[me]


def kept_by_sender(entries: PaddedCOO, encoded: Encoded) -> PaddedCOO:
    """What the sender has to keep: entries that were not sent, and errors of the others."""
    values = jnp.where(encoded.sent, encoded.error, entries.values)
    return PaddedCOO(values, entries.indices, entries.size)


def unsent_count(entries: PaddedCOO, encoded: Encoded) -> jax.Array:
    """Entries that are not in the message, ``i32[]``."""
    return entries.count() - jnp.sum(encoded.sent, dtype=jnp.int32)
