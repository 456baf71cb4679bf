"""Whether something is finite, in one pass that XLA can make together with others."""

import jax
import jax.numpy as jnp

from sparse_collectives._coo import compaction
from sparse_collectives._platform import by_platform


def all_finite(x: jax.Array) -> jax.Array:
    """Whether every entry of ``x f[..., n]`` is finite, ``bool[]``.

    Cost: one pass. On a GPU it has the shape of a selection's mask, so that a selection from
    the same ``x`` takes it along.
    """
    return by_platform(_at_once, _by_words, x)


def _at_once(x: jax.Array) -> jax.Array:
    # On CPU what is reduced is written first: a byte for each entry is a quarter of
    # what a sum that is NaN where one of them is would take.
    return jnp.all(jnp.isfinite(x))


def _by_words(x: jax.Array) -> jax.Array:
    if not x.size:
        return jnp.ones((), jnp.bool_)
    flat = x.reshape(-1)
    words = compaction.mask_words(lambda start, stop: ~jnp.isfinite(flat[start:stop]), x.size)
    return ~jnp.any(words != 0)
