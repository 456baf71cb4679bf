"""The factors of all matrices: between steps, as one message, and as bases."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._roles import OF_SHARD, SHARED
from optax_ext._low_rank._matrices import Matrix
from sparse_collectives import _hash

# The noise that is added to the unit columns of a factor.
_NOISE = 2.0**-20


@_roles.declared
class Factors(NamedTuple):
    """The factors from which the next step starts, the same on every worker.

    In the optimizer state they have a leading axis of 1.

    Attributes:
      left: ``f32[r * sum of rows]``, the left factors of the last step, one matrix after the
        other; ``()`` if not needed (PowerSGD).
      right: ``f32[r * sum of cols]``, the right factors, ``[r, cols]`` each.
    """

    left: Annotated[Any, SHARED, OF_SHARD]
    right: Annotated[jax.Array, SHARED, OF_SHARD]


def start(matrices: Sequence[Matrix], rank: int, seed: int, *, left: bool) -> Factors:
    """Independent normal numbers, the same on every worker and platform."""

    def normal(number, sides):
        key = jax.random.fold_in(_hash.key(seed), number)
        return jax.random.normal(key, (rank * sum(sides),), jnp.float32)

    rows, cols = [m.rows for m in matrices], [m.cols for m in matrices]
    return Factors(normal(0, rows) if left else (), normal(1, cols))


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """All arrays as one ``f32[...]``."""
    flat = [part.reshape(-1) for part in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The inverse of :func:`joined`."""
    parts, offset = [], 0
    for shape in shapes:
        size = 1
        for side in shape:
            size *= side
        parts.append(flat[offset : offset + size].reshape(shape))
        offset += size
    return parts


def left_shapes(matrices: Sequence[Matrix], rank: int) -> list[tuple[int, ...]]:
    """The shapes of the left factors."""
    return [(m.rows, rank) for m in matrices]


def right_shapes(matrices: Sequence[Matrix], rank: int) -> list[tuple[int, ...]]:
    """The shapes of the right factors, transposed so that no product transposes a matrix."""
    return [(rank, m.cols) for m in matrices]


def times(one: jax.Array, other: jax.Array) -> jax.Array:
    """The matrix product, in float32 on every platform.

    With the 10 bits of TensorFloat32 the products of the workers would not add up to the product
    of their mean, and the difference would be in no residual.
    """
    return jnp.matmul(one, other, precision=lax.Precision.HIGHEST)


def unit(columns: jax.Array) -> jax.Array:
    """Columns of about the same length, none of them zero, ``f32[m, r]``.

    A column that vanished (from a gradient that is zero, or of a lower rank) would stay zero: a
    little noise gives it a new direction. Without the scaling, squares of small columns would
    also vanish.
    """
    most = jnp.max(jnp.abs(columns), axis=0, keepdims=True)
    scaled = columns / jnp.where(most > 0, most, 1.0)
    place = lax.iota(jnp.uint32, columns.size).reshape(columns.shape)
    noise = lax.bitcast_convert_type(_hash.mix(place), jnp.int32).astype(jnp.float32)
    return scaled + jnp.float32(_NOISE / 2**31) * noise


def basis(columns: jax.Array) -> jax.Array:
    """An orthonormal basis of the space of the columns, ``f32[m, r]``.

    It uses Householder reflections, instead of the paper's Gram-Schmidt: from linearly dependent
    columns they still make an orthonormal basis, whose other directions are arbitrary.
    """
    return jnp.linalg.qr(unit(columns), mode="reduced")[0]
