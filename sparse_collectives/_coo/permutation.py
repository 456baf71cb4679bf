"""A random permutation of 0 .. n-1, computed entry by entry and never stored.

A bijection of the words of m bits, 2**m >= n, is applied until the result is below n (cycle
walking). Each of its rounds is a bijection: adding a key, xor with a right shift, multiplying by
an odd key. Distinct starts have distinct images, so nothing is drawn twice.
"""

import jax
import jax.numpy as jnp
from jax import lax

_ROUNDS = 6
# A bijection of very few bits has few distinct keys.
_FEWEST_BITS = 6


def images(key: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """The images of ``places i32[k]``, in [0, size), under the permutation of a key, ``i32[k]``.

    Cost: about six rounds of arithmetic for each place.
    """
    if places.shape[0] == size:
        return places  # All of them: the order is of no use.
    bits = max(_FEWEST_BITS, (size - 1).bit_length())
    keys = jax.random.bits(key, (2, _ROUNDS), jnp.uint32)
    mask = jnp.uint32(2**bits - 1)

    def permute(x):
        for i in range(_ROUNDS):
            x = (x + keys[0, i]) & mask
            x ^= x >> ((bits + 1) // 2)
            x = (x * (keys[1, i] | 1)) & mask
        return x ^ (x >> ((bits + 1) // 2))

    def outside(x):
        return jnp.any(x >= size)

    def walk(x):
        return jnp.where(x >= size, permute(x), x)

    start = permute(places.astype(jnp.uint32))
    return lax.while_loop(outside, walk, start).astype(jnp.int32)
