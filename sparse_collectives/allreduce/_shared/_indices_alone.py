"""Messages of indices without values, for exchanges of which nobody reads the values.

A :class:`Codec`, so that an exchange that moves pairs moves indices alone, one word each
and as they are. What is decoded has the value 0 everywhere.
"""

import jax
import jax.numpy as jnp

from sparse_collectives._types import Codec, Encoded
from sparse_collectives.allreduce._shared import _messages
from sparse_collectives.padded_coo import PaddedCOO


def shorter(codec: Codec, slots: int, size: int, dtype) -> Codec:
    """The codec of indices alone; ``codec`` itself where its pairs take no more words."""
    alone = Codec(_encode, _decode, _no_dense, _no_dense, exact=True)
    words = [_messages.pair_words(each, slots, size, dtype) for each in (alone, codec)]
    return alone if words[0] < words[1] else codec


def _encode(coo: PaddedCOO, seed: jax.Array) -> Encoded:
    del seed
    return Encoded(coo.indices, coo.indices < coo.size, jnp.zeros_like(coo.values))


def _decode(message: jax.Array, size: int, dtype) -> PaddedCOO:
    return PaddedCOO(jnp.zeros_like(message, dtype), message, size)


def _no_dense(*arguments):
    # A dense run has no indices, and whoever asks for indices alone has none to send.
    raise NotImplementedError(f"no indices to send in a dense run: {arguments}")
