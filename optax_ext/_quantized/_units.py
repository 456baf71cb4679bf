"""The unit of each entry: its own size in past updates, which all workers know."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext._error_feedback import _nonfinite, _roles
from optax_ext._error_feedback._roles import OF_SHARD, SHARED
from sparse_collectives import _platform
from sparse_collectives._sparse_ops import sum_by_halves

# The entries of a flat buffer that share a smallest unit; a code has scales for as many.
_BLOCK = 256
# The share that is kept of the mean square at each step.
_DECAY = 0.97
# The smallest unit of an entry, as a multiple of the root mean square of its block. Entries that
# have hardly moved would have units so small that their first gradient is a huge number of them.
_SMALLEST = 0.1
# An update counts up to this multiple of its unit, so that a spike does not make a unit useless.
_MOST = 4.0
# In a block that has not moved units are 1, and if they are so small that a quotient may overflow.
_TINY = 2.0**-62


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


def units_of(units: Units) -> jax.Array:
    """The unit of each entry, ``f32[n]``, in 2^-62 to 2^64; 1 in a block that has not moved."""
    square = units.mean_square
    size = square.shape[0]
    blocks = jnp.pad(square, (0, -size % _BLOCK)).reshape(-1, _BLOCK)
    # Divided first, because the sum may overflow.
    smallest = _SMALLEST * jnp.sqrt(sum_by_halves(blocks / _BLOCK))[:, None]

    def unit(blocks: jax.Array, smallest: jax.Array) -> jax.Array:
        found = jnp.sqrt(blocks) + smallest
        return jnp.where(smallest > _TINY, found, 1.0)

    # A CPU would take the mean of a block again for each of its entries.
    return _platform.written(unit, blocks, smallest).reshape(-1)[:size]


def following(units: Units, unit: jax.Array, update: jax.Array) -> Units:
    """What units are made of after an update; entries that are not finite change nothing.

    Args:
      units: what they were made of.
      unit: ``f32[n]``, of :func:`units_of`.
      update: ``f32[n]``.
    """
    most = jnp.where(unit == 1.0, _nonfinite.LARGEST_GRADIENT, _MOST * unit)
    seen = jnp.minimum(jnp.abs(update), jnp.minimum(most, _nonfinite.LARGEST_GRADIENT))
    step = (1 - _DECAY) * (seen * seen - units.mean_square)
    return Units(units.mean_square + jnp.where(jnp.isfinite(update), step, 0.0))
