"""The length of a message, its useful part, and the entries that its sender must keep."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _data
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bitset
from sparse_collectives._types import Codec, Encoded, Undelivered


def pair_words(codec: Codec, slots: int, size: int, dtype) -> int:
    """Words of a message of ``slots`` value-index pairs of a vector of length ``size``."""
    message = jax.eval_shape(
        lambda: codec.encode(_data.empty(size, slots, dtype), jnp.uint32(0)).message
    )
    return message.size


def dense_words(codec: Codec, length: int, dtype) -> int:
    """Words of a message of ``length`` dense values."""
    message, _ = jax.eval_shape(
        lambda: codec.encode_dense(jnp.zeros((length,), dtype), jnp.uint32(0))
    )
    return message.size


def useful_words(words: jax.Array | float, entries: jax.Array, slots: int) -> jax.Array:
    """The words without padding, ``f32[]``, of a message with ``entries`` in ``slots``."""
    return jnp.float32(words) * entries.astype(jnp.float32) / float(max(1, slots))


class Words(NamedTuple):
    """Words of 4 bytes that an exchange moves.

    Attributes:
      received: ``f32[]``, received by each worker, padding included; equal on all workers.
      useful: ``f32[]``, sent by this worker, without padding.
    """

    received: jax.Array
    useful: jax.Array


def no_words() -> Words:
    """The words of no exchange."""
    return Words(jnp.float32(0), jnp.float32(0))


def words_in_full(received: jax.Array | float) -> Words:
    """The words of messages without padding."""
    words = jnp.asarray(received, jnp.float32)
    return Words(words, words)


def words_of_pairs(received: float, entries: jax.Array, slots: int) -> Words:
    """The words of value-index pairs, if this worker sent ``entries`` in ``slots``."""
    return Words(jnp.float32(received), useful_words(received, entries, slots))


def words_in_all(*parts: Words) -> Words:
    """The words of several exchanges together."""
    return functools.reduce(lambda a, b: Words(a.received + b.received, a.useful + b.useful), parts)


def to_others(sent: jax.Array, me: jax.Array) -> jax.Array:
    """Entries in the blocks ``bool[P, c]`` for all workers but ``me``, ``i32[]``."""
    counts = jnp.sum(sent, axis=1, dtype=jnp.int32)
    return jnp.sum(counts, dtype=jnp.int32) - counts[me]


def kept_by_sender(entries: PaddedCOO, encoded: Encoded) -> PaddedCOO:
    """The values that the sender keeps: entries that were not sent, and errors of the others."""
    values = jnp.where(encoded.sent, encoded.error, entries.values)
    return PaddedCOO(values, entries.indices, entries.size)


def unsent_count(entries: PaddedCOO, encoded: Encoded) -> jax.Array:
    """Entries that are not in the message, ``i32[]``."""
    return entries.count() - jnp.sum(encoded.sent, dtype=jnp.int32)


def by_total(
    coo: PaddedCOO,
    sent: jax.Array,
    error: jax.Array | None,
    later: Sequence[tuple[PaddedCOO, jax.Array | None]],
    total: PaddedCOO,
) -> Undelivered:
    """Contributors keep entries that are not in the total; who loses a part of a sum keeps it.

    An entry may find no slot on its way to a sum, and a sum none on its way to the total; a lossy
    codec rounds both. If an index is not in the total, every worker keeps the whole of its
    contribution. If it is, the total differs from the sum of the contributions by the parts that
    were cut off or rounded off on the way, and each part stays with the worker that removed it.

    Args:
      coo: this worker's selection, c slots.
      sent: ``bool[c]``, which slots were sent, or went on with this worker.
      error: ``f[c]``, the part of each sent slot that the receivers miss; None: nothing.
      later: for each later exchange, the entries that this worker held and the part
        of each that the receivers miss.
      total: the result, the same on every worker.

    Returns:
      The kept part of each slot of ``coo``; the slots of ``later`` as other entries.
    """
    members = _bitset.of_unique(total.indices, coo.size)
    delivered = sent & _bitset.contains(members, coo.indices)
    missing = jnp.zeros_like(coo.values) if error is None else error
    others = [
        _data.only_where(
            _bitset.contains(members, entries.indices) & (missed != 0),
            PaddedCOO(missed, entries.indices, entries.size),
        )
        for entries, missed in later
        if missed is not None
    ]
    return Undelivered.of(coo, jnp.where(delivered, missing, coo.values), others)


def indices_alone(codec: Codec, slots: int, size: int, dtype) -> Codec:
    """A codec for indices without values, for exchanges whose values are not read.

    With this :class:`Codec` an exchange that moves pairs moves indices alone, unencoded, one word
    each. It is ``codec`` itself if the pairs of ``codec`` take no more words. Decoded values have
    no meaning.
    """
    alone = Codec(_encode_indices, _decode_indices, _no_dense, _no_dense, exact=True)
    words = [pair_words(each, slots, size, dtype) for each in (alone, codec)]
    return alone if words[0] < words[1] else codec


def _encode_indices(coo: PaddedCOO, seed: jax.Array) -> Encoded:
    del seed
    return Encoded(coo.indices, coo.indices < coo.size, jnp.zeros_like(coo.values))


def _decode_indices(message: jax.Array, size: int, dtype) -> PaddedCOO:
    return PaddedCOO(jnp.zeros_like(message, dtype), message, size)


def _no_dense(*arguments):
    # A dense run has no indices, and an exchange of indices alone has no dense runs.
    raise NotImplementedError(f"no indices to send in a dense run: {arguments}")
