"""Partial sums on their way: value-index pairs, or dense if pairs take more words.

SparCML, section 5.1: a stream is sparse up to delta = n isize / (c + isize) entries and
dense beyond, so that no message is longer than a dense one. Here the slots of a message
decide, which are static, so the switch is made when a program is traced. With a codec,
delta is the count for which its pairs and its dense run have the same number of words.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _data
from sparse_collectives._data import PaddedCOO, sum_dtype
from sparse_collectives._types import Codec
from sparse_collectives.allreduce._parts import _merge, _messages

# Pairs, or ``f[n]``.
Stream = PaddedCOO | jax.Array


class Sent(NamedTuple):
    """A stream as a message.

    Attributes:
      message: ``i32[w]``.
      lost: the part that the sender has to keep: entries that are not in the message, and the
        errors of the others.
      sent: ``bool[]`` or ``bool[c]``, whether the slots of ``lost`` are in the message.
      useful: ``f32[]``, words of the message without padding.
    """

    message: jax.Array
    lost: PaddedCOO
    sent: jax.Array
    useful: jax.Array


def goes_dense(codec: Codec, slots: int, size: int, dtype) -> bool:
    """Whether so many pairs of a vector of length ``size`` take more words than all of it."""
    pairs = _messages.pair_words(codec, slots, size, dtype)
    return pairs > _messages.dense_words(codec, size, dtype)


def shorter(entries: PaddedCOO, codec: Codec) -> Stream:
    """Entries in the form that takes fewer words."""
    if goes_dense(codec, entries.capacity, entries.size, entries.values.dtype):
        return entries.to_dense()
    return entries


def encode(stream: Stream, codec: Codec, seed: jax.Array) -> Sent:
    """The message of a stream."""
    if isinstance(stream, PaddedCOO):
        encoded = codec.encode(stream, seed)
        count = jnp.sum(encoded.sent, dtype=jnp.int32)
        return Sent(
            message=encoded.message,
            lost=_messages.kept_by_sender(stream, encoded),
            sent=encoded.sent,
            useful=_messages.useful_words(encoded.message.size, count, stream.capacity),
        )
    message, error = codec.encode_dense(stream, seed)
    return Sent(
        message=message,
        lost=entries_of(error),
        sent=jnp.ones((), jnp.bool_),
        useful=jnp.float32(message.size),
    )


def decode(message: jax.Array, like: Stream, codec: Codec) -> Stream:
    """Decodes the message of a stream with the shape of ``like``."""
    if isinstance(like, PaddedCOO):
        return codec.decode(message, like.size, like.values.dtype)
    return codec.decode_dense(message, like.shape[0], like.dtype)


def add(first: Stream, second: Stream, most: int) -> Stream:
    """The sum: two sparse streams are merged, and with a dense one the sum is dense.

    Args:
      first: the first summand.
      second: the second summand.
      most: the largest number of indices of both together.
    """
    if isinstance(first, PaddedCOO) and isinstance(second, PaddedCOO):
        rows = [PaddedCOO(x.values[None], x.indices[None], x.size) for x in (first, second)]
        return _merge.reduce_blocks(rows, first.size, first.values.dtype, capacity=most)
    a, b = (x.to_dense() if isinstance(x, PaddedCOO) else x for x in (first, second))
    wide = sum_dtype(a.dtype)
    return (a.astype(wide) + b.astype(wide)).astype(a.dtype)


def only_where(condition: jax.Array, stream: Stream) -> Stream:
    """The stream if ``condition bool[]`` holds, else an empty one."""
    if isinstance(stream, PaddedCOO):
        return _data.only_where(condition, stream)
    return jnp.where(condition, stream, jnp.zeros_like(stream))


def entries_of(values: jax.Array) -> PaddedCOO:
    """The nonzero entries of ``f[n]``, in n slots."""
    size = values.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    return PaddedCOO(values, jnp.where(values != 0, place, size), size)
