"""Magnitudes as integers, masks and short codes packed into words, and running sums of counts.

The bit pattern of a non-negative IEEE number, read as an integer, is ordered
like the number. Comparing patterns costs as much as comparing floats. It treats
subnormals exactly, which a CPU may flush to zero, and it orders NaN above infinity,
so that a NaN is selected and seen instead of staying in a residual indefinitely.

``jnp.cumsum`` adds windows of 16, and XLA's CPU compiler adds their offsets again wherever the
sum is read, entry by entry. Finding the position of a bit with it took ten times as long as with
:func:`running_sum`.
"""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_collectives import _varying
from sparse_collectives._platform import by_platform, once, written

MAGNITUDE_BITS = 31
# The pattern of infinity: finite magnitudes are below it, and NaN is above.
INFINITY_BITS = 0x7F800000
_MAGNITUDE_MASK = np.int32(0x7FFFFFFF)
# A direct sum of fewer entries costs less than a loop, and makes a smaller program.
_LONG = 1 << 14
# Entries of a row: all rows advance by one entry at a time.
_ROW = 256


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bit pattern of ``|x|`` as ``i32``; bfloat16 and float16 are widened."""
    if x.dtype == jnp.bfloat16:
        # A bfloat16 is the upper half of a float32; a conversion may flush subnormals.
        upper = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) << 16
        return upper & _MAGNITUDE_MASK
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & _MAGNITUDE_MASK


def magnitude_from_bits(bits: jax.Array) -> jax.Array:
    """The inverse of :func:`magnitude_bits`, ``f32``."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def pack_mask(mask: jax.Array) -> jax.Array:
    """Packs ``bool[32 * w]`` into ``u32[w]``; bit b of word i is entry ``32 i + b``."""
    return by_platform(_pack_by_words, _pack_by_bytes, mask)


def _pack_by_words(mask: jax.Array) -> jax.Array:
    # With two minor dimensions XLA's CPU backend vectorizes the reduction, and the pass over n
    # runs at memory speed, twice as fast as with one dimension.
    weights = (jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)).reshape(4, 8)
    blocks = mask.reshape(-1, 4, 8)
    zero = jnp.uint32(0)
    return jnp.sum(jnp.where(blocks, weights, zero), axis=(1, 2), dtype=jnp.uint32)


def _pack_by_bytes(mask: jax.Array) -> jax.Array:
    # Rows of 8 took a GPU 0.7 times as long as rows of 32.
    weights = jnp.uint32(1) << jnp.arange(8, dtype=jnp.uint32)
    rows = jnp.where(mask.reshape(-1, 8), weights, jnp.uint32(0))
    bytes_ = jnp.sum(rows, axis=1, dtype=jnp.uint32).astype(jnp.uint8)
    return lax.bitcast_convert_type(bytes_.reshape(-1, 4), jnp.uint32)


def mask_words(mask_of, size: int) -> jax.Array:
    """Packs a mask over ``size`` entries, ``u32[ceil(size / 32)]``.

    Args:
      mask_of: ``mask_of(start, stop) -> bool[stop - start]``, called for the part that fills whole
        words and for the rest, so that no n-sized buffer is padded, which would copy it.
      size: the number of entries, n >= 1.
    """
    main = size // 32 * 32
    parts = []
    if main:
        parts.append(pack_mask(mask_of(0, main)))
    if main < size:
        parts.append(pack_mask(jnp.pad(mask_of(main, size), (0, 32 - size % 32))))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def mask_by_magnitude(acc: jax.Array, predicate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The entries whose magnitude satisfies a predicate, ``u32[ceil(n / 32)]``.

    Args:
      acc: ``f[n]``.
      predicate: maps the bits of magnitudes, ``i32[m]``, to ``bool[m]``.

    Cost: one pass over n entries.
    """
    return mask_words(lambda start, stop: predicate(magnitude_bits(acc[start:stop])), acc.shape[0])


def all_below(*pairs: tuple[jax.Array, float]) -> jax.Array:
    """Whether all magnitudes of each array ``f[..., n]`` are below its bound, ``bool[]``.

    With infinity as the bound, all entries are finite. All arrays have one size.

    Cost: one pass for all of them, packed like the mask of a selection. On a CPU this takes half
    the time of ``jnp.all``, which writes a byte for each entry. On a GPU it is part of the pass of
    a selection from the same array.
    """
    size = pairs[0][0].size
    flat = [(x.reshape(-1), bound) for x, bound in pairs]

    def bad(start: int, stop: int) -> jax.Array:
        beyond = (~(jnp.abs(x[start:stop]) < bound) for x, bound in flat)
        return functools.reduce(operator.or_, beyond)

    return ~jnp.any(mask_words(bad, size) != 0) if size else ~jnp.any(bad(0, 0))


def sum_by_halves(values: jax.Array) -> jax.Array:
    """The sum along the last axis of ``f[..., c]``, for c a power of two.

    The halves are added, so that a CPU adds vectors in the loop that makes the values; it would
    write them first, and then add one after the other.
    """
    return jnp.sum(by_halves(operator.add, values, 8), axis=-1)


def sum_of(function: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """:func:`sum_by_halves` of ``function(*args)``, in one pass over the arguments on a CPU."""

    def groups(*args: jax.Array) -> jax.Array:
        return by_halves(operator.add, function(*args), 32)

    return sum_by_halves(written(groups, *args))


def by_halves(
    combine: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array, groups: int
) -> jax.Array:
    """The last axis of ``f[..., c]`` combined to so many groups i, i + groups, ...

    Both are powers of two; a shorter axis stays as it is.
    """
    while values.shape[-1] > groups:
        half = values.shape[-1] // 2
        values = combine(values[..., :half], values[..., half:])
    return values


def popcount(words: jax.Array) -> jax.Array:
    """The number of set bits of each word, ``i32``."""
    return lax.population_count(words).astype(jnp.int32)


def select_bit(words: jax.Array, rank: jax.Array) -> jax.Array:
    """The position (0 to 31) of the set bit number ``rank`` (from 0) of each word.

    It halves the word five times by a popcount, without a table or a loop over bits. If a
    word has fewer set bits, the result is in 0..31 and has no meaning.
    """
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = words & jnp.uint32((1 << width) - 1)
        below = popcount(low)
        high = rank >= below
        rank = jnp.where(high, rank - below, rank)
        words = jnp.where(high, words >> width, low)
        position = jnp.where(high, position + width, position)
    return position


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs ``i32[..., m]`` in [0, 2**bits) into ``i32[..., ceil(m / (32 // bits))]``.

    The first code is in the lowest bits. Missing codes of the last word are 0.
    """
    each = 32 // bits
    words = pad_to(codes, each).astype(jnp.uint32)
    words = words.reshape(*codes.shape[:-1], words.shape[-1] // each, each)
    shifts = _shifts(words.ndim, bits)
    # The codes don't overlap, so the sum is their union.
    return lax.bitcast_convert_type(jnp.sum(words << shifts, axis=-1, dtype=jnp.uint32), jnp.int32)


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """Unpacks ``i32[..., w]`` to ``i32[..., w * (32 // bits)]``, the inverse of :func:`pack`."""
    return unpack_words(words, bits).reshape(*words.shape[:-1], words.shape[-1] * (32 // bits))


def unpack_words(words: jax.Array, bits: int) -> jax.Array:
    """The codes of each word, ``i32[..., w, 32 // bits]``."""
    codes = lax.bitcast_convert_type(words, jnp.uint32)[..., None]
    codes = codes >> _shifts(codes.ndim, bits)
    return (codes & jnp.uint32((1 << bits) - 1)).astype(jnp.int32)


def pack_planes(codes: jax.Array, bits: int) -> jax.Array:
    """Packs ``i32[..., m]`` in [0, 2**bits) into ``i32[..., bits * ceil(m / 32)]``, without gaps.

    The first ``ceil(m / 32)`` words have the lowest bit of each code, and so on.
    """
    codes = pad_to(codes, 32)
    planes = [pack_mask(((codes >> bit) & 1).reshape(-1) > 0) for bit in range(bits)]
    words = [plane.reshape(*codes.shape[:-1], codes.shape[-1] // 32) for plane in planes]
    empty = jnp.zeros((*codes.shape[:-1], 0), jnp.uint32)
    return lax.bitcast_convert_type(jnp.concatenate([empty, *words], axis=-1), jnp.int32)


def unpack_planes(words: jax.Array, bits: int, length: int) -> jax.Array:
    """Unpacks ``i32[..., w]`` to ``i32[..., length]``, the inverse of :func:`pack_planes`."""
    each = -(-length // 32)
    codes = jnp.zeros((*words.shape[:-1], 32 * each), jnp.int32)
    for bit in range(bits):
        plane = words[..., bit * each : (bit + 1) * each]
        codes |= unpack(plane, 1) << bit
    return codes[..., :length]


def _shifts(ndim: int, bits: int) -> jax.Array:
    """The first bit of each code in a word, ``u32[1, ..., 32 // bits]``."""
    shifts = bits * jnp.arange(32 // bits, dtype=jnp.uint32)
    return lax.expand_dims(shifts, range(ndim - 1))


def pad_to(x: jax.Array, multiple: int, fill: int | float = 0) -> jax.Array:
    """``x`` with its last axis padded to a multiple of ``multiple``."""
    missing = -x.shape[-1] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    return jnp.pad(x, widths, constant_values=fill)


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
    padding = [(0, 0)] * len(lead) + [(0, -size % _ROW)]
    rows = jnp.pad(counts, padding).reshape(*lead, -1, _ROW)
    total = jnp.sum(rows, axis=-1)
    before = _varying.varying_like(_at_once(total) - total, counts)

    def advance(sums: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums += column
        return sums, sums

    _, columns = lax.scan(advance, before, jnp.moveaxis(rows, -1, 0))
    return jnp.moveaxis(columns, 0, -1).reshape(*lead, -1)[..., :size]
