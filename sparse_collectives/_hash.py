"""Random numbers and permutations without a state: computed for a position, and never stored.

Random rounding needs one number for each value, the same on every platform, without
a key to pass around. Two rounds of a 32-bit mixing function give such a number for
about ten integer operations each.

A random permutation of 0 to n - 1 applies a bijection of the words of m bits, 2**m >= n, until
the result is below n (cycle walking). Each step of a round is a bijection: adding a key, xor with a
right shift, and multiplying by an odd key. Distinct positions have distinct images, so no index is
drawn twice.
"""

import jax
import jax.numpy as jnp
from jax import lax

# 2**32 divided by the golden ratio, so that consecutive seeds end up far apart.
_GOLDEN = 0x9E3779B9
# Rounds and bits of a permutation: a bijection of very few bits has few distinct keys.
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
    """Combines several integers into one seed, ``u32[]``; their order matters."""
    seed = jnp.uint32(_GOLDEN)
    for part in parts:
        seed = mix(seed + jnp.uint32(_GOLDEN) + jnp.asarray(part).astype(jnp.uint32))
    return seed


def random_bits(seed: jax.Array, position: jax.Array) -> jax.Array:
    """A random number, ``u32[...]``, for each ``position i32[...]`` under ``seed u32[]``."""
    key = mix(jnp.asarray(seed).astype(jnp.uint32) + jnp.uint32(_GOLDEN))
    # The second round has another key: after one round alone, two seeds would give the
    # same numbers in another order.
    return mix(mix(position.astype(jnp.uint32) ^ key) + mix(key))


def seed(count: jax.Array, stage: int, sender: jax.Array | int) -> jax.Array:
    """The seed of a message of step ``count i32[]``, which differs for each stage and sender.

    Independent errors of different workers and steps do not add up. Replicas that encode the
    same sum pass the same ``sender``, so that they send the same bits.
    """
    return combine(count, stage, sender)


def turn(count: jax.Array, stage: int) -> jax.Array:
    """The turn of a stage of step ``count i32[]``, ``u32[]``: it decides which entries wait.

    It is unlike any seed, and differs between stages: a window that depended on the window
    before it, or on the entries that a codec leaves out, could leave out one entry without end.
    It is the same on every worker, so that all parts of an index that all have go together.
    """
    return combine(count, stage, -1)


def below(turn: jax.Array, count: jax.Array) -> jax.Array:
    """The start ``i32[...]``, in ``[0, count)``, of a window over ``count i32[...]`` entries.

    Wherever more entries than slots compete, the slots take a window over the ranks of the
    entries that starts here, so that no entry waits indefinitely. Turns are practically
    independent, so a start is uniform whatever the turns before it gave. Each value has
    probability ``1 / count``, up to a relative error of ``count / 2**32``.

    Args:
      turn: an integer, ``[]``, which differs at each step, and at each of several places
        that an entry has to pass in one step.
      count: the number of entries; 0 gives 0.
    """
    bits = random_bits(turn, jnp.zeros((), jnp.int32))
    return (bits % jnp.maximum(count, 1).astype(jnp.uint32)).astype(jnp.int32)


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Random numbers ``f32[...]`` in [0, 1), multiples of 2**-24."""
    bits = random_bits(seed, position) >> 8
    return bits.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def key(seed: int) -> jax.Array:
    """A random key whose bits depend neither on the default of jax nor on ``vmap``."""
    return jax.random.key(seed, impl="threefry2x32")


def permuted(key: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """The images of ``places i32[k]``, in [0, size), under the permutation of a key, ``i32[k]``.

    Cost: about six rounds of arithmetic for each place.
    """
    if places.shape[0] == size:
        return places  # With all places their order does not matter.
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
