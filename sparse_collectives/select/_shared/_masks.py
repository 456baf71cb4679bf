"""Masks over the accumulator by magnitude, 32 entries to a word."""

from collections.abc import Callable

import jax

from sparse_collectives._coo import _bits, compaction


def mask_words(acc: jax.Array, predicate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The entries whose magnitude satisfies a predicate, ``u32[ceil(n / 32)]``.

    Args:
      acc: ``f[n]``.
      predicate: from the bits of magnitudes, ``i32[m]``, to ``bool[m]``.

    Cost: one pass over n entries.
    """
    return compaction.mask_words(
        lambda start, stop: predicate(_bits.magnitude_bits(acc[start:stop])), acc.shape[0]
    )
