"""Thresholds that follow their counts by fixed factors.

The program that Ok-Topk links to (section 1) does not reuse a threshold as it is, as the text
says (section 3.1.3): whenever a count is far from k, it moves the threshold by a percent or so.
Its factors and bounds are those for VGG-16; for BERT it has 1.025 and 1.036.
"""

import jax
import jax.numpy as jnp

# Within a step, while more than 4k/3 entries pass, and at most so many times.
_RAISE, MOST_RAISES = 1.03, 5
# From one step to the next.
_LOCAL, _GLOBAL = 1.012, 1.008


def raised(threshold: jax.Array) -> jax.Array:
    """The local threshold of another try within the step, ``f32[]``."""
    return threshold * jnp.float32(_RAISE)


def too_many(count: jax.Array, k: int) -> jax.Array:
    """Whether a step has to try again with a higher local threshold, ``bool[]``."""
    return count > 4 * k // 3


def next_local(threshold: jax.Array, count: jax.Array, k: int) -> jax.Array:
    """The local threshold of the next step, ``f32[]``: moved below 2k/3 and above 5k/4."""
    return _moved(threshold, count, -(-2 * k // 3), 5 * k // 4, _LOCAL)


def next_global(threshold: jax.Array, count: jax.Array, k: int) -> jax.Array:
    """The global threshold of the next step, ``f32[]``: moved below 2k/3 and above 4k/3."""
    return _moved(threshold, count, -(-2 * k // 3), 4 * k // 3, _GLOBAL)


def _moved(threshold: jax.Array, count: jax.Array, least: int, most: int, by: float) -> jax.Array:
    # A factor in both directions, as some compilers make one of a division anyway.
    factors = jnp.asarray([1 / by, 1.0, by], jnp.float32)
    which = 1 - (count < least).astype(jnp.int32) + (count > most).astype(jnp.int32)
    return threshold * factors[which]
