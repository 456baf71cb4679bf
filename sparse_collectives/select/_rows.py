"""The largest magnitudes of each row of a matrix, all rows at once.

A row's k-th magnitude is bounded from below by the k-th largest among the maxima of groups of its
entries. The few entries that reach this bound are put into slots, row by row, and the exact
selection is made there. If they do not fit in the slots, which the count shows, the bound is
replaced by the exact k-th magnitude, found by bisection over all entries.

Every intermediate result has the rows along its last axis, so that one
implementation serves rows that are contiguous in memory (``axis=1``) and rows
that are the columns of the stored matrix (``axis=0``).
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives._sparse_ops import _bits

_WORD = 32
# Entries in a group, and groups for each selected entry.
_GROUP = 16
_GROUPS_PER_ENTRY = 4
# Lowest bits of the bound that stay 0, because a bound need not be sharp.
_BLUNT = 15


def largest_of_rows(matrix: jax.Array, k: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """The k largest magnitudes of each of r rows of N entries.

    Among entries tied at a row's k-th magnitude, the first ones are taken.
    Zeros are never taken. NaN counts as larger than infinity.

    Args:
      matrix: ``f[r, N]`` with ``axis=1``, ``f[N, r]`` with ``axis=0``.
      k: static, 1 <= k <= N.
      axis: the axis along which the entries of a row lie.

    Returns:
      ``i32[s]``, the selected places in ``matrix.ravel()`` in any order, with the
      size of the matrix in empty slots, s at most ``r * min(N, 2 k + 8)``; and the
      bits of each row's k-th magnitude, ``i32[r]``, or 0 if fewer are nonzero.

    Cost: two passes over n = r N entries, 16 over n / 16 maxima and 31 over about ``2 k r`` slots.
    33 more over n in the rare miss, and if more than 1/8 of a row is selected.
    """
    length = matrix.shape[axis]
    capacity = min(length, 2 * k + 8)
    words, missed = _candidates(matrix, k, axis, capacity)
    # A while loop without turns instead of a ``lax.cond``, which computes both under vmap.
    _, words = lax.while_loop(
        lambda carry: carry[0],
        lambda carry: _exact_selection(carry, matrix, k, axis),
        (missed, words),
    )
    place, used = _slots(words, capacity)
    row = jnp.arange(place.shape[1], dtype=jnp.int32)[None]
    flat = row * length + place if axis else place * place.shape[1] + row
    bits = _bits.magnitude_bits(matrix.ravel().at[jnp.where(used, flat, 0)].get(mode="clip"))
    bits = jnp.where(used, bits, 0)
    threshold = _bisect(k, bits, 0)
    above = bits > threshold[None]
    tied = (bits == threshold[None]) & (bits > 0)
    wanted = k - jnp.sum(above, axis=0, keepdims=True, dtype=jnp.int32)
    chosen = above | (tied & (jnp.cumsum(tied, axis=0, dtype=jnp.int32) <= wanted))
    return jnp.where(chosen, flat, matrix.size).ravel(), threshold


def _candidates(matrix: jax.Array, k: int, axis: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """A mask ``u32[W, r]`` of the candidates, and whether it is useless, ``bool[]``."""
    length = matrix.shape[axis]
    group = min(_GROUP, length // (_GROUPS_PER_ENTRY * k))
    low = _zero_per_row(matrix, axis)
    if group > 1:
        low = _bisect(k, _group_maxima(matrix, group, axis), _BLUNT)
    elif capacity < length:
        # There is no bound, so there are no candidates.
        return _mask_words(matrix, axis, lambda bits: bits < _to(bits, low)), jnp.any(low == 0)
    words = _mask_words(matrix, axis, lambda bits: bits >= _to(bits, jnp.maximum(low, 1)))
    count = jnp.sum(_bits.popcount(words), axis=0, dtype=jnp.int32)
    return words, jnp.any(count > capacity)


def _group_maxima(matrix: jax.Array, group: int, axis: int) -> jax.Array:
    """The bits of the maxima of ``group`` entries of a row, ``i32[N // group, r]``."""
    groups = matrix.shape[axis] // group
    if axis:
        bits = _bits.magnitude_bits(matrix[:, : group * groups])
        return jnp.max(bits.reshape(-1, group, groups), axis=1).T
    bits = _bits.magnitude_bits(matrix[: group * groups])
    return jnp.max(bits.reshape(group, groups, -1), axis=0)


def _exact_selection(carry, matrix: jax.Array, k: int, axis: int):
    """The mask ``u32[W, r]`` of the exact selection, by bisection over all entries."""
    # Tied to the carry; otherwise XLA moves |matrix| out of the loop, into n words.
    (missed, _), matrix = lax.optimization_barrier((carry, matrix))

    def step(i, pattern):
        here, pattern = lax.optimization_barrier((matrix, pattern))
        candidate = pattern | (jnp.int32(1) << (_bits.MAGNITUDE_BITS - 1 - i))
        words = _mask_words(here, axis, lambda bits: bits >= _to(bits, candidate))
        count = jnp.sum(_bits.popcount(words), axis=0, dtype=jnp.int32)
        return jnp.where(count >= k, candidate, pattern)

    threshold = lax.fori_loop(0, _bits.MAGNITUDE_BITS, step, _zero_per_row(matrix, axis))
    above = _mask_words(matrix, axis, lambda bits: bits > _to(bits, threshold))
    # Zeros are tied with a threshold of 0, which all nonzeros are above.
    tied = _mask_words(matrix, axis, lambda bits: (bits == _to(bits, threshold)) & (bits > 0))
    missing = k - jnp.sum(_bits.popcount(above), axis=0, dtype=jnp.int32)
    return jnp.zeros_like(missed), above | _first_bits(tied, missing)


def _to(bits: jax.Array, pattern: jax.Array) -> jax.Array:
    """A pattern for each row, in the shape of the argument of a predicate."""
    return jnp.broadcast_to(pattern, bits.shape)


def _zero_per_row(matrix: jax.Array, axis: int) -> jax.Array:
    return jnp.zeros_like(lax.index_in_dim(matrix, 0, axis, keepdims=False), jnp.int32)


def _bisect(k: int, bits: jax.Array, blunt: int) -> jax.Array:
    """The largest pattern that k entries of each column of ``bits i32[m, r]`` reach.

    Its lowest ``blunt`` bits are left 0.
    """

    def step(i, pattern):
        candidate = pattern | (jnp.int32(1) << (_bits.MAGNITUDE_BITS - 1 - i))
        count = jnp.sum(bits >= candidate[None], axis=0, dtype=jnp.int32)
        return jnp.where(count >= k, candidate, pattern)

    return lax.fori_loop(0, _bits.MAGNITUDE_BITS - blunt, step, jnp.zeros_like(bits[0]))


def _slots(words: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The places of the set bits of each column of ``words u32[W, r]``.

    Returns:
      ``i32[capacity, r]``, ascending, and ``bool[capacity, r]``, the slots in use.
    """
    number, rows = words.shape
    inclusive = jnp.cumsum(_bits.popcount(words), axis=0, dtype=jnp.int32)
    rank = jnp.arange(capacity, dtype=jnp.int32)[:, None] + jnp.zeros_like(inclusive[:1])
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    # The first word whose inclusive count is above the rank, by binary search.
    word = jnp.zeros_like(rank)
    flat = inclusive.ravel()
    for step in (1 << bit for bit in reversed(range(number.bit_length()))):
        probe = word + step - 1
        passed = flat.at[jnp.minimum(probe, number - 1) * rows + row].get(mode="clip") <= rank
        word = jnp.where((probe < number) & passed, word + step, word)
    used = rank < inclusive[-1:]
    at = jnp.minimum(word, number - 1) * rows + row
    bits = words.ravel().at[at].get(mode="clip")
    before = flat.at[at].get(mode="clip") - _bits.popcount(bits)
    return _WORD * word + _bits.select_bit(bits, rank - before), used


def _first_bits(words: jax.Array, count: jax.Array) -> jax.Array:
    """The first ``count i32[r]`` set bits of each column of ``words u32[W, r]``."""
    counts = _bits.popcount(words)
    wanted = count[None] - (jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts)
    position = _bits.select_bit(words, jnp.clip(wanted, 0, 31)).astype(jnp.uint32)
    some = words & ((jnp.uint32(1) << position) - 1)
    return jnp.where(wanted >= counts, words, jnp.where(wanted > 0, some, jnp.uint32(0)))


def _mask_words(matrix: jax.Array, axis: int, predicate) -> jax.Array:
    """A mask over the entries, 32 of a row to a word, ``u32[ceil(N / 32), r]``.

    ``predicate`` receives bits with the rows along their last axis.
    """
    length = matrix.shape[axis]
    main = length // _WORD * _WORD
    parts = []
    if main:
        parts.append(_pack(lax.slice_in_dim(matrix, 0, main, axis=axis), axis, predicate))
    if main < length:
        rest = lax.slice_in_dim(matrix, main, length, axis=axis)
        padding = [(0, 0), (0, 0)]
        padding[axis] = (0, _WORD + main - length)
        # Padding with zeros, which no mask contains.
        parts.append(_pack(jnp.pad(rest, padding), axis, predicate))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _pack(matrix: jax.Array, axis: int, predicate) -> jax.Array:
    """As :func:`_mask_words`, for rows of whole words."""
    bits = _bits.magnitude_bits(matrix)
    if axis:
        rows = matrix.shape[0]
        # This shape packs fastest; for the predicate the rows move to the last axis.
        blocks = jnp.moveaxis(bits.reshape(rows, -1, 4, 8), 0, -1)
        mask = jnp.moveaxis(predicate(blocks), -1, 0)
        return _bits.pack_mask(mask.ravel()).reshape(rows, -1).T
    mask = predicate(bits.reshape(-1, _WORD, matrix.shape[1]))
    weights = (jnp.uint32(1) << jnp.arange(_WORD, dtype=jnp.uint32))[:, None]
    return jnp.sum(jnp.where(mask, weights, jnp.uint32(0)), axis=1, dtype=jnp.uint32)
