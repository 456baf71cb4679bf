"""Bucketed top-k: the largest magnitudes of every so many consecutive entries.

SparCML selects k out of each 512 consecutive entries. No entry competes with
those of another layer, and the selection is spread evenly, so that the regions
of an allreduce need no balancing.

A bucket's k-th magnitude is bounded from below by the k-th largest among the
maxima of groups of its entries. The few entries that reach this bound are put
into slots, bucket by bucket, and the exact k-th magnitude is found there. Where
the slots do not hold them (the count shows it) it is found by bisection over
all entries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _bits, _validation, compaction
from sparse_collectives._types import SelectInfo, Selector
from sparse_collectives.padded_coo import PaddedCOO

_WORD = 32
# Entries in a group, and groups for each wanted entry.
_GROUP = 16
_GROUPS_PER_ENTRY = 4


def bucketed(*, density: float, bucket: int = 512) -> Selector:
    """Selects the ``max(1, round(density * bucket))`` largest of each bucket.

    Of several entries of a bucket's k-th magnitude those with the smallest
    indices are taken. Zeros are never selected. NaN counts as larger than
    infinity. What is left of n after whole buckets is a shorter bucket, from
    which the same share is taken; a bucket larger than n is one of n entries.

    Args:
      density: the share taken from each bucket, in (0, 1]. Below 1 / bucket one
        entry of each is taken.
      bucket: B, consecutive entries that compete: a multiple of 32, so that a
        bucket fills whole words of a mask. The paper takes 512.

    Returns:
      A :class:`Selector` whose buffers have one slot for each entry that the
      buckets may take, about ``density * n``, and whose state is ``()``.
      ``info.threshold`` is the smallest of the buckets' k-th magnitudes.

    Raises:
      ValueError: density is not in (0, 1], or bucket no positive multiple of 32.

    Cost: four passes over n entries (group maxima, candidates, and the masks of
    what is above and at the k-th magnitudes), 31 over n / 16 maxima and as many
    over about ``2 density n`` slots, O(k log n). 31 more over n in the rare miss,
    and where more than an eighth of the entries is wanted.

    References:
      Renggli et al., SparCML: High-Performance Sparse Communication for Machine
      Learning, SC 2019, section 8.

    Example:
      >>> import jax.numpy as jnp
      >>> selector = bucketed(density=1 / 32, bucket=32)
      >>> acc = jnp.zeros(70).at[jnp.array([3, 7, 40])].set(jnp.array([1.0, -2.0, 0.5]))
      >>> coo, _, info = selector.select(acc, selector.init(70))
      >>> coo.indices.tolist(), coo.values.tolist()
      ([7, 40, 70], [-2.0, 0.5, 0.0])
    """
    density = _validation.check_density(density)
    bucket = _validation.check_positive_int("bucket", bucket)
    if bucket % _WORD:
        raise ValueError(
            f"bucket must be a multiple of {_WORD}, got {bucket}: write for example bucket=512."
        )

    def init(size: int) -> tuple[()]:
        _validation.check_size(size)
        return ()

    def select(acc: jax.Array, state: tuple[()]):
        acc = _validation.as_vector("acc", acc)
        size = acc.shape[0]
        main = size // bucket * bucket
        parts, capacity = [], 0
        if main:
            k = _validation.count_from_density(density, bucket)
            parts.append(_select_rows(acc[:main].reshape(-1, bucket), k))
            capacity += k * (main // bucket)
        if main < size:
            k = _validation.count_from_density(density, size - main)
            rest = jnp.pad(acc[main:], (0, -size % _WORD))
            parts.append(_select_rows(rest.reshape(1, -1), k))
            capacity += k
        words = jnp.concatenate([words.ravel() for words, _ in parts])
        indices, count = compaction.set_positions(words, capacity, size)
        values = acc.at[indices].get(mode="fill", fill_value=0)
        lowest = jnp.min(jnp.concatenate([thresholds for _, thresholds in parts]))
        info = SelectInfo(
            selected=count,
            overflow=jnp.zeros_like(count),
            threshold=_bits.magnitude_from_bits(lowest),
        )
        return PaddedCOO(values, indices, size), state, info

    return Selector(init, select)


def _select_rows(rows: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row.

    Args:
      rows: ``f[r, B]``, one bucket to a row.
      k: static, 1 <= k <= B.

    Returns:
      The mask of the selected entries, ``u32[r, B / 32]``, and the bits of each
      row's k-th magnitude, ``i32[r]``.
    """
    threshold = _kth_bits(rows, k)
    above = _words(rows, lambda bits: bits > _per_row(threshold))
    # Zeros are tied with a threshold of 0, which all nonzeros are above.
    tied = _words(rows, lambda bits: (bits == _per_row(threshold)) & (bits > 0))
    missing = k - jnp.sum(_bits.popcount(above), axis=1, dtype=jnp.int32)
    return above | _first_bits(tied, missing), threshold


def _kth_bits(rows: jax.Array, k: int) -> jax.Array:
    """The bits of each row's k-th largest magnitude, ``i32[r]``; 0 for none."""
    number, width = rows.shape
    group = min(_GROUP, width // (_GROUPS_PER_ENTRY * k))
    zeros = jnp.zeros_like(rows[:, 0], jnp.int32)
    if group < 2:
        found, missed = zeros, jnp.ones_like(zeros[0]) > 0
    else:
        groups = width // group
        bits = _bits.magnitude_bits(rows[:, : group * groups])
        maxima = jnp.max(bits.reshape(number, group, groups), axis=1).T
        low = _bisect(zeros, k, lambda pattern: jnp.sum(maxima >= pattern, axis=0))
        slots, count = _slots(rows, low, 2 * k + 8)
        found = _bisect(zeros, k, lambda pattern: jnp.sum(slots >= pattern, axis=0))
        missed = jnp.any(count > slots.shape[0])

    def unfinished(carry):
        return carry[0] >= 0

    def step(carry):
        # Tied to the carry, or XLA moves |rows| out of the loop into n words.
        here, bit = lax.optimization_barrier((rows, carry[0]))
        pattern = carry[1] | (jnp.int32(1) << jnp.maximum(bit, 0))
        words = _words(here, lambda bits: bits >= _per_row(pattern))
        count = jnp.sum(_bits.popcount(words), axis=1)
        return bit - 1, jnp.where(count >= k, pattern, carry[1])

    # A while loop of no turns and not a ``lax.cond``, which under vmap computes both.
    first = jnp.where(missed, jnp.int32(_bits.MAGNITUDE_BITS - 1), jnp.int32(-1))
    return lax.while_loop(unfinished, step, (first, jnp.where(missed, zeros, found)))[1]


def _bisect(zeros: jax.Array, k: int, count_of) -> jax.Array:
    """The largest patterns ``i32[r]`` that at least k entries of each row reach."""

    def step(i, pattern):
        candidate = pattern | (jnp.int32(1) << (_bits.MAGNITUDE_BITS - 1 - i))
        return jnp.where(count_of(candidate) >= k, candidate, pattern)

    return lax.fori_loop(0, _bits.MAGNITUDE_BITS, step, zeros)


def _slots(rows: jax.Array, low: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The magnitudes that reach ``low i32[r]``, row by row.

    Returns:
      ``i32[capacity, r]``, bits, 0 where a row has no more; and ``i32[r]``, how
      many there are in each row.
    """
    number, width = rows.shape
    at_least = jnp.maximum(low, 1)
    words = _words(rows, lambda bits: bits >= _per_row(at_least))
    per_row = words.shape[1]
    counts = _bits.popcount(words).ravel()
    inclusive = jnp.cumsum(counts, dtype=jnp.int32)
    ends = inclusive[per_row - 1 :: per_row]
    begins = ends - jnp.sum(counts.reshape(number, per_row), axis=1, dtype=jnp.int32)
    rank = begins + jnp.arange(capacity, dtype=jnp.int32)[:, None]
    # The first word of the row whose inclusive count is above the rank.
    word = per_row * jnp.arange(number, dtype=jnp.int32) + jnp.zeros_like(rank)
    for step in _halvings(per_row):
        probe = word + step - 1
        within = probe < per_row * (jnp.arange(number, dtype=jnp.int32) + 1)
        passed = inclusive.at[probe].get(mode="clip") <= rank
        word = jnp.where(within & passed, word + step, word)
    bits = words.ravel().at[word].get(mode="clip")
    before = inclusive.at[word].get(mode="clip") - _bits.popcount(bits)
    position = _WORD * word + _bits.select_bit(bits, rank - before)
    magnitude = _bits.magnitude_bits(rows.ravel().at[position].get(mode="clip"))
    return jnp.where(rank < ends, magnitude, 0), ends - begins


def _halvings(count: int) -> list[int]:
    """Steps of a binary search over ``count`` words: powers of two, descending."""
    return [1 << bit for bit in reversed(range(count.bit_length()))]


def _first_bits(words: jax.Array, count: jax.Array) -> jax.Array:
    """The first ``count i32[r]`` set bits of each row of ``words u32[r, w]``."""
    counts = _bits.popcount(words)
    inclusive = jnp.cumsum(counts.ravel(), dtype=jnp.int32).reshape(counts.shape)
    before = inclusive - counts - (inclusive[:, :1] - counts[:, :1])
    wanted = count[:, None] - before
    position = _bits.select_bit(words, jnp.clip(wanted, 0, 31)).astype(jnp.uint32)
    some = words & ((jnp.uint32(1) << position) - 1)
    return jnp.where(wanted >= counts, words, jnp.where(wanted > 0, some, jnp.uint32(0)))


def _per_row(x: jax.Array) -> jax.Array:
    return x[:, None, None, None]


def _words(rows: jax.Array, predicate) -> jax.Array:
    """A mask over ``rows f[r, B]``, ``u32[r, B / 32]``.

    ``predicate`` is given the bits in the shape that packs fastest, ``[r, B / 32,
    4, 8]``.
    """
    number, width = rows.shape
    mask = predicate(_bits.magnitude_bits(rows).reshape(number, width // _WORD, 4, 8))
    return _bits.pack_mask(mask.ravel()).reshape(number, width // _WORD)
