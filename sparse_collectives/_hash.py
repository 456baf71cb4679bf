"""Random numbers and permutations without a state: computed for a position, and never stored.

Random rounding needs one number for each value, the same on every platform, and
no key to pass around. Two rounds of a mixing function of 32 bits give that for
about ten integer operations each.

A random permutation of 0 .. n-1 is a bijection of the words of m bits, 2**m >= n, applied until
the result is below n (cycle walking). Each of its rounds is a bijection: adding a key, xor with a
right shift, multiplying by an odd key. Distinct starts have distinct images, so nothing is drawn
twice.
"""

import jax
import jax.numpy as jnp
from jax import lax

# 2**32 divided by the golden ratio: seeds that follow one another end up far apart.
_GOLDEN = 0x9E3779B9
# Of a permutation; a bijection of very few bits has few distinct keys.
_ROUNDS, _FEWEST_BITS = 6, 6


def mix(x: jax.Array) -> jax.Array:
    """A bijection of ``u32`` in which every bit of the result depends on every bit of ``x``.

    The construction is murmur's finalizer, with the constants of C. Wellons'
    search for the least bias (``lowbias32``, public domain).
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def combine(*parts: jax.Array | int) -> jax.Array:
    """One seed, ``u32[]``, of several integers; their order counts."""
    seed = jnp.uint32(_GOLDEN)
    for part in parts:
        seed = mix(seed + jnp.uint32(_GOLDEN) + jnp.asarray(part).astype(jnp.uint32))
    return seed


def random_bits(seed: jax.Array, position: jax.Array) -> jax.Array:
    """``u32[...]``, a number for each ``position i32[...]`` under ``seed u32[]``."""
    key = mix(jnp.asarray(seed).astype(jnp.uint32) + jnp.uint32(_GOLDEN))
    # A second round under another key: after one alone, two seeds would give the
    # same numbers in another order.
    return mix(mix(position.astype(jnp.uint32) ^ key) + mix(key))


def below(turn: jax.Array, count: jax.Array) -> jax.Array:
    """``i32[...]`` in ``[0, count)``: where a window over ``count i32[...]`` entries starts.

    Every place in which entries wait for a slot takes a window over their ranks that
    starts here, so that none waits for ever. Turns are as good as independent, and so a
    start is uniform whatever the turns before it gave. Each value has probability
    ``1 / count`` to within a share ``count / 2**32`` of that.

    Args:
      turn: an integer, ``[]``: another one at each step, and in each of several places
        that an entry has to pass at the same step.
      count: 0 gives 0.
    """
    bits = random_bits(turn, jnp.zeros((), jnp.int32))
    return (bits % jnp.maximum(count, 1).astype(jnp.uint32)).astype(jnp.int32)


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """``f32[...]`` in [0, 1), a multiple of 2**-24."""
    bits = random_bits(seed, position) >> 8
    return bits.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def permuted(key: jax.Array, places: jax.Array, size: int) -> jax.Array:
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
