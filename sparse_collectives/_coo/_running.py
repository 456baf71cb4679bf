"""Running sums of counts, in a form that is fast on a CPU.

``jnp.cumsum`` adds windows of 16, and XLA's CPU compiler adds their offsets again wherever the
sum is read, entry by entry. Finding the position of a bit with it took ten times as long.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _compat
from sparse_collectives._platform import by_platform, once

# A direct sum of fewer entries costs less than a loop, and makes a smaller program.
_LONG = 1 << 14
# Entries of a row: all rows advance by one entry at a time.
_ROW = 256


def running_sum(counts: jax.Array) -> jax.Array:
    """The sums of ``counts[..., m]`` up to each entry along the last axis, ``i32[..., m]``.

    Args:
      counts: integers or booleans, none of them negative.

    Cost: three passes over m entries.
    """
    counts = counts.astype(jnp.int32)
    if counts.shape[-1] < _LONG:
        return _at_once(counts)
    return by_platform(_on_a_cpu, _at_once, counts)


def _at_once(counts: jax.Array) -> jax.Array:
    return jnp.cumsum(counts, axis=-1, dtype=jnp.int32)


def _on_a_cpu(counts: jax.Array) -> jax.Array:
    # No count is negative, but XLA cannot see that.
    some = jnp.ravel(counts)[0] >= 0
    return once(some, _by_rows, jnp.zeros_like, counts)


def _by_rows(counts: jax.Array) -> jax.Array:
    size, lead = counts.shape[-1], counts.shape[:-1]
    room = [(0, 0)] * len(lead) + [(0, -size % _ROW)]
    rows = jnp.pad(counts, room).reshape(*lead, -1, _ROW)
    total = jnp.sum(rows, axis=-1)
    before = _compat.varying_like(_at_once(total) - total, counts)

    def advance(sums: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums += column
        return sums, sums

    _, columns = lax.scan(advance, before, jnp.moveaxis(rows, -1, 0))
    return jnp.moveaxis(columns, 0, -1).reshape(*lead, -1)[..., :size]
