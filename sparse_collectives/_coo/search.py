"""Where numbers belong in an ascending array."""

import functools

import jax
import jax.numpy as jnp

from sparse_collectives._platform import by_platform

# Comparisons beyond which a binary search is quicker on a GPU, too.
_COMPARISONS = 1 << 28


def places(ascending: jax.Array, queries: jax.Array, *, side: str = "left") -> jax.Array:
    """``jnp.searchsorted`` of ``queries [...]`` in ``ascending [m]``, ``i32[...]``.

    A binary search; on a GPU, of a few queries, one comparison with everything, since each
    step of a search is a launch.
    """
    binary = functools.partial(_binary, side=side)
    if ascending.shape[0] * queries.size > _COMPARISONS:
        return binary(ascending, queries)
    return by_platform(binary, functools.partial(_counted, side=side), ascending, queries)


def _binary(ascending: jax.Array, queries: jax.Array, *, side: str) -> jax.Array:
    return jnp.searchsorted(ascending, queries, side=side, method="scan").astype(jnp.int32)


def _counted(ascending: jax.Array, queries: jax.Array, *, side: str) -> jax.Array:
    rows = ascending.reshape((-1,) + (1,) * queries.ndim)
    before = rows < queries[None] if side == "left" else rows <= queries[None]
    return jnp.sum(before, axis=0, dtype=jnp.int32)
