"""The unit of each entry: its own size in past updates, which all workers know.

All arithmetic on values is exact but for sums: units are powers of two, and a square has at most
24 significant bits. So programs that round a product and a sum together, and programs that do not,
have the same bits.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_ext._error_feedback import _nonfinite, _roles
from optax_ext._error_feedback._roles import OF_SHARD, SHARED
from sparse_collectives import _platform
from sparse_collectives._sparse_ops import sum_of

# The entries of a flat buffer that share a smallest unit; a code has scales for as many.
_BLOCK = 256
# The share of a new square in the mean square.
_SHARE = 2.0**-5
# The smallest unit of an entry, as a multiple of the root mean square of its block. Entries that
# have hardly moved would have units so small that their first gradient is a huge number of them.
_SMALLEST = 0.125
# An update counts up to this multiple of its unit, so that a spike does not make a unit useless.
_MOST = 4.0
# In a block that has not moved units are 1, and if they are so small that a quotient may overflow.
_TINY = 2.0**-62
# Sign and exponent of a float32; with 11 more bits of the significand, the square is exact.
_POWER, _SQUARED = np.int32(-0x800000), np.int32(-0x1000)
# Minus the bits of a power of two, the bits of its inverse.
_TWICE_ONE = np.int32(0x7F000000)


@_roles.declared
class Units(NamedTuple):
    """What the units of the entries are made of, the same on every worker.

    In the optimizer state it has a leading axis of 1.

    Attributes:
      mean_square: ``f32[n]``, running means of the squares of the updates.
    """

    mean_square: Annotated[jax.Array, SHARED, OF_SHARD]


def start(size: int) -> Units:
    """Before the first update."""
    return Units(jnp.zeros((size,), jnp.float32))


class Scales(NamedTuple):
    """What values are measured by in a step.

    Attributes:
      unit: of each entry, ``f32[n]``, a power of two from 2^-62 to 2^64; 1 in a block that has not
        moved.
      has_moved: of each block, ``bool[b, 1]``.
    """

    unit: jax.Array
    has_moved: jax.Array


def scales_of(units: Units) -> Scales:
    """The units of a step, from the updates before it."""
    square = units.mean_square
    blocks = jnp.pad(square, (0, -square.shape[0] % _BLOCK)).reshape(-1, _BLOCK)
    # Divided first, because the sum may overflow.
    mean = sum_of(lambda blocks: blocks / _BLOCK, blocks)
    smallest = _SMALLEST * jnp.sqrt(mean)[:, None]

    def unit(square: jax.Array, smallest: jax.Array) -> jax.Array:
        return jnp.where(smallest > _TINY, _masked(jnp.sqrt(square) + smallest, _POWER), 1.0)

    def in_blocks(square: jax.Array, smallest: jax.Array) -> jax.Array:
        # A CPU would take the mean of a block again for each of its entries.
        blocks = jnp.pad(square, (0, -square.shape[0] % _BLOCK)).reshape(-1, _BLOCK)
        return _platform.written(unit, blocks, smallest).reshape(-1)[: square.shape[0]]

    def in_place(square: jax.Array, smallest: jax.Array) -> jax.Array:
        # A GPU can write new squares over these if they are not padded.
        return unit(square, jnp.repeat(smallest, _BLOCK, axis=1).reshape(-1)[: square.shape[0]])

    found = _platform.by_platform(in_blocks, in_place, square, smallest)
    return Scales(found, smallest > _TINY)


def in_units(values: jax.Array, unit: jax.Array) -> jax.Array:
    """``values / unit``: the inverse of a power of two takes no division."""
    inverse = _TWICE_ONE - lax.bitcast_convert_type(unit, jnp.int32)
    return values * lax.bitcast_convert_type(inverse, jnp.float32)


def following(units: Units, scales: Scales, update: jax.Array) -> Units:
    """What units are made of after an update; entries that are not finite change nothing.

    Args:
      units: what they were made of.
      scales: of :func:`scales_of`.
      update: ``f32[n]``.
    """
    has_moved = jnp.broadcast_to(scales.has_moved, (scales.has_moved.shape[0], _BLOCK))
    has_moved = has_moved.reshape(-1)[: update.shape[0]]
    most = jnp.where(has_moved, _MOST * scales.unit, _nonfinite.LARGEST_GRADIENT)
    seen = jnp.minimum(jnp.abs(update), jnp.minimum(most, _nonfinite.LARGEST_GRADIENT))
    seen = _masked(seen, _SQUARED)
    step = _SHARE * (seen * seen - units.mean_square)
    return Units(units.mean_square + jnp.where(jnp.isfinite(update), step, 0.0))


def _masked(x: jax.Array, mask: np.int32) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & mask, jnp.float32)
