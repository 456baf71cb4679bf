"""Sums and maxima over the finite entries of a vector, at the speed of memory.

The estimators of a threshold start from the moments of the accumulator. A plain ``jnp.sum(x)`` over
n entries has two problems: NaN and infinity spread to the threshold, and squares of large entries
overflow. A masked sum is ten times slower than a plain one on CPU. Therefore the maximum is taken
first: it shows whether a mask is needed at all, and gives a power of two to scale by.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._sparse_ops import _bits

# Entries of a first-stage sum: partial sums keep the rounding error small.
_ROW = 1024


class Extent(NamedTuple):
    """The maximum of a vector, the sum of its magnitudes, and factors to scale by.

    Attributes:
      largest: ``f32[]``, the largest finite magnitude, 0 if there is none.
      clean: ``bool[]``, whether all entries are finite.
      count: ``f32[]``, the number of finite entries, at least 1.
      total: ``f32[]``, the sum of the finite magnitudes, times ``down``.
      down: ``f32[]``, the power of two that scales ``largest`` into [1, 2).
      up: ``f32[]``, its inverse.
    """

    largest: jax.Array
    clean: jax.Array
    count: jax.Array
    total: jax.Array
    down: jax.Array
    up: jax.Array

    def mean(self, count: jax.Array | int) -> jax.Array:
        """The sum of the finite magnitudes over ``count``, ``f32[]``, at most the largest one."""
        return jnp.minimum(self.total / count * self.up, self.largest)


def extent(acc: jax.Array) -> Extent:
    """The largest finite magnitude and the sum of the finite magnitudes.

    Cost: two passes over n entries, and three more if some are not finite.
    """
    largest = _reduce(acc, jnp.abs, jnp.max, jnp.maximum)
    down, _ = _scales(largest)
    total = _reduce(acc, lambda x: jnp.abs(x) * down, jnp.sum, jnp.add)
    # Both are needed: XLA's maximum on CPU ignores NaN, and the sum does not.
    clean = (largest < jnp.inf) & jnp.isfinite(total)

    def masked():
        largest = _reduce(acc, lambda x: _where_finite(x, jnp.abs(x)), jnp.max, jnp.maximum)
        down, _ = _scales(largest)
        total = finite_sum(acc, lambda x: jnp.abs(x) * down, jnp.zeros_like(clean))
        return largest, total

    largest, total = lax.cond(clean, lambda: (largest, total), masked)
    down, up = _scales(largest)
    size = jnp.full_like(largest, acc.shape[0])
    not_finite = lax.cond(
        clean,
        lambda: jnp.zeros_like(_bits.magnitude_bits(largest)),
        lambda: count_reaching(acc, jnp.int32(_bits.INFINITY_BITS)),
    )
    count = jnp.maximum(size - not_finite.astype(jnp.float32), 1.0)
    return Extent(largest, clean, count, total, down, up)


def finite_sum(acc: jax.Array, of, clean: jax.Array) -> jax.Array:
    """The sum of ``of(x)`` over the finite entries, ``f32[]``.

    Args:
      acc: ``f[n]``.
      of: an elementwise function of ``f32`` arrays.
      clean: ``bool[]``, whether all entries are finite.

    Cost: one pass over n entries.
    """

    def masked():
        return _reduce(acc, lambda x: _where_finite(x, of(x)), jnp.sum, jnp.add)

    return lax.cond(clean, lambda: _reduce(acc, of, jnp.sum, jnp.add), masked)


def count_reaching(acc: jax.Array, threshold_bits: jax.Array) -> jax.Array:
    """The number of entries whose magnitude reaches a threshold; zeros never do.

    Cost: one pass over n entries.
    """
    bits = jnp.maximum(threshold_bits, 1)
    words = _bits.mask_by_magnitude(acc, lambda magnitude: magnitude >= bits)
    return jnp.sum(_bits.popcount(words), dtype=jnp.int32)


def _reduce(acc: jax.Array, of, reduce, combine) -> jax.Array:
    """Reduces rows, which vectorize, then their results, then the remaining entries."""
    main = acc.shape[0] // _ROW * _ROW
    parts = []
    if main:
        rows = of(acc[:main].astype(jnp.float32).reshape(-1, 4, _ROW // 4))
        parts.append(reduce(reduce(rows, axis=(1, 2))))
    if main < acc.shape[0]:
        parts.append(reduce(of(acc[main:].astype(jnp.float32))))
    return combine(*parts) if len(parts) > 1 else parts[0]


def _scales(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The power of two that scales ``largest`` into [1, 2), and its inverse."""
    exponent = jnp.clip(_bits.magnitude_bits(largest) >> 23, 1, 253)
    down = _bits.magnitude_from_bits((254 - exponent) << 23)
    return down, _bits.magnitude_from_bits(exponent << 23)


def _where_finite(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(_bits.magnitude_bits(x) < _bits.INFINITY_BITS, y, jnp.zeros_like(y))
