"""Whether arrays of several devices are the same, told by a word of each."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, extend


def fingerprint(number: int, leaf: jax.Array) -> jax.Array:
    """A hash of the entries of a leaf and of their places, ``u32[]``; 0 where all are zero."""
    flat = leaf.reshape(-1)
    bits = extend.magnitude_bits(flat).astype(jnp.uint32)
    signed = jnp.where(flat < 0, bits | jnp.uint32(1 << 31), bits)
    place = lax.iota(jnp.uint32, flat.shape[0]) ^ _hash.combine(number)
    # The same entries at other places are other gradients.
    hashed = _hash.mix(signed + _hash.mix(place))
    # NaN on all workers is what a run that diverges has.
    counts = (bits != 0) & jnp.isfinite(flat)
    return jnp.sum(jnp.where(counts, hashed, jnp.uint32(0)), dtype=jnp.uint32)
