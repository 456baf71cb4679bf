"""The exact k-th largest magnitude of a vector, and the k largest, without sorting it.

A strided sample gives a magnitude that a little more than k entries reach with near certainty;
these are compacted in one pass, and the exact k-th is found among them by interpolation between bit
patterns. If the sample misled, which the count shows, a bisection over the 31 bits of the magnitude
runs over all n entries; it is slower and just as exact.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_collectives import _varying
from sparse_collectives._data import PaddedCOO
from sparse_collectives._platform import by_platform, once
from sparse_collectives._sparse_ops import _bits, _compaction

# Up to this size about 10 passes over all entries cost less than sampling.
DIRECT_SIZE = 1 << 17
_SAMPLE_SIZE = 1 << 16
# Expected number of sampled entries above the k-th magnitude: it determines the accuracy.
_SAMPLE_HITS = 256
# For vectors of up to so many entries, the most bits that a GPU fixes in one pass: with few
# entries a launch costs more than the comparisons.
_WIDTHS = ((1 << 17, 8), (1 << 20, 7), (1 << 22, 4), (1 << 31, 2))
_NONE = 0x7FFFFFFF
# Passes that interpolate before bisection takes over.
_STRAIGHT = 16


def kth_magnitude_bits(x: jax.Array, k: int) -> jax.Array:
    """The bit pattern of the k-th largest magnitude of ``x``.

    Args:
      x: ``f[n]``.
      k: static, 1 <= k <= n.

    Returns:
      ``i32[]``: exactly ``sort(|x|)[n - k]`` as a bit pattern. 0 when fewer than
      k entries are nonzero.

    Cost: one pass over n entries for the candidates, about 10 over the sample and over
    about 1.5 k candidates; in the rare miss 31 passes over n.
    """
    size = x.shape[0]
    if size <= DIRECT_SIZE:
        return bisect(_bits.magnitude_bits(x), k)
    _, _, capacity = _plan(size, k)
    if capacity >= size // 2:
        return bisect(_bits.magnitude_bits(x), k)
    low = sampled_magnitude_bits(x, k)
    candidates, count = _compaction.compact(x, low, capacity=capacity)
    enough = (count >= k) & (count <= capacity)
    from_candidates = bisect(_bits.magnitude_bits(candidates.values), k)
    return bisect_all(x, k, from_candidates, ~enough)


def sampled_magnitude_bits(x: jax.Array, k: int) -> jax.Array:
    """A magnitude that, with near certainty, k entries of ``x`` or a few more reach.

    Cost: a gather of the sample and about 10 passes over it.
    """
    stride, rank, _ = _plan(x.shape[0], k)
    return bisect(_bits.magnitude_bits(x[::stride]), rank)


def _plan(size: int, k: int) -> tuple[int, int, int]:
    """The stride of the sample, the rank to take in it, and the candidates' slots.

    The number of sampled entries above the k-th magnitude has mean q = k m / n
    and standard deviation sqrt(q); the rank leaves four deviations on both sides.
    """
    wanted = max(_SAMPLE_SIZE, _SAMPLE_HITS * size // k)
    # An odd stride does not align with layers of even width.
    stride = max(1, size // wanted) | 1
    sample_size = -(-size // stride)
    hits = k * sample_size / size
    margin = 4 * math.sqrt(hits) + 4
    rank = min(sample_size, math.ceil(hits + margin))
    capacity = math.ceil((hits + 2 * margin + 4 * math.sqrt(margin)) * size / sample_size)
    return stride, rank, capacity


def bisect(bits: jax.Array, k: int | jax.Array) -> jax.Array:
    """The largest pattern that at least k entries of ``bits i32[m]`` reach, or 0."""
    return bisect_and_count(bits, k)[0]


def bisect_and_count(bits: jax.Array, k: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pattern of :func:`bisect`, and how many entries reach it, ``i32[]`` each.

    If the pattern is 0, the count has no meaning.
    """
    return by_platform(_by_interpolation, _by_counting, bits, jnp.asarray(k, jnp.int32))


def _by_interpolation(bits: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Interpolates between the ends of an interval until k entries reach the lower one.

    Patterns are nearly logarithms, in which the logarithm of a count is nearly linear, so about 8
    passes are enough. Bisection handles the parts that are not linear in the end.
    """
    wanted = jnp.log(jnp.maximum(k, 1).astype(jnp.float32))

    def excess(count: jax.Array) -> jax.Array:
        return jnp.log(jnp.maximum(count.astype(jnp.float32), 0.5)) - wanted

    def unfinished(carry: Any) -> jax.Array:
        low, high, reached, *_ = carry
        return (high - low > 1) & (reached > k)

    def step(carry: Any) -> Any:
        low, high, reached, above, below, turn, was_above = carry
        share = jnp.where(turn < _STRAIGHT, above / (above - below), 0.5)
        width = (high - low).astype(jnp.float32)
        middle = low + jnp.clip(share * width, 1.0, width - 1.0).astype(jnp.uint32)
        middle = jnp.clip(middle, low + 1, high - 1)
        count = jnp.sum(bits.astype(jnp.uint32) >= middle, dtype=jnp.int32)
        taken, here = count >= k, excess(count)
        # An end that stays has half its weight (the Illinois rule); else it might stay for long.
        above = jnp.where(taken, here, jnp.where(was_above, above, above / 2))
        below = jnp.where(taken, jnp.where(was_above, below / 2, below), here)
        low, high = jnp.where(taken, middle, low), jnp.where(taken, high, middle)
        reached = jnp.where(taken, count, reached)
        return low, high, reached, above, below, turn + 1, taken

    # Padding is not an end of the interval.
    low = jnp.min(jnp.where(bits > 0, bits, _NONE)).astype(jnp.uint32)
    reached = jnp.sum(bits > 0, dtype=jnp.int32)
    # No pattern is as large as 2^31.
    high = jnp.max(bits).astype(jnp.uint32) + 1
    ends = excess(reached), excess(jnp.zeros_like(reached))
    turn = jnp.zeros_like(k)
    carry = _varying.varying_like((low, high, reached, *ends, turn, turn > 0), bits[0])
    low, _, reached, *_ = lax.while_loop(unfinished, step, carry)
    low = low.astype(jnp.int32)
    # If k entries reach the lower end, the k-th is their smallest. There may also be fewer than k.
    smallest = jnp.min(jnp.where(bits >= low, bits, _NONE))
    pattern = jnp.where(reached == k, smallest, low)
    enough = reached >= k
    return jnp.where(enough, pattern, 0), jnp.where(enough, reached, 0)


def _by_counting(bits: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fixes several bits at a time: one pass compares with all patterns that they can make.

    It counts instead of adding to histograms: additions to one address take turns, and
    many magnitudes of similar size have the same address.
    """
    width = next(width for longest, width in _WIDTHS if bits.shape[0] <= longest)
    passes, end = -(-_bits.MAGNITUDE_BITS // width), _bits.MAGNITUDE_BITS
    pattern = reached = jnp.zeros_like(bits[0])
    for left in reversed(range(passes)):
        shift = _bits.MAGNITUDE_BITS * left // passes
        digits = np.arange(1, 1 << (end - shift), dtype=np.int32) << shift
        # bits >= pattern | digits; in this form a GPU makes no array of patterns first.
        counts = jnp.sum(bits[:, None] - digits[None] >= pattern, axis=0, dtype=jnp.int32)
        # Counts fall, so the smallest sufficient one is of the last candidate that is reached.
        enough = counts >= k
        # One sum over both makes the pattern in the launch that also adds up the digits.
        digit = jnp.where(enough, 1 << shift, 0) + jnp.where(digits == digits[0], pattern, 0)
        pattern, end = jnp.sum(digit, dtype=jnp.int32), shift
        smallest = jnp.min(jnp.where(enough, counts, _NONE))
        reached = jnp.where(smallest < _NONE, smallest, reached)
    return pattern, reached


def largest_mask(bits: jax.Array, k: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of ``bits i32[m]`` are the k largest, ``bool[m]``, and the k-th pattern.

    Among several entries at the k-th pattern the first are taken; zeros never are.
    """
    pattern = bisect(bits, k)
    slot, _ = slots_from(bits, pattern, k, none=k)
    return slot < k, pattern


def slots_from(
    bits: jax.Array, pattern: jax.Array, k: int | jax.Array, *, none: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Slots, in order, for the nonzero entries of ``bits i32[m]`` that reach ``pattern``.

    There are at most k if no more are above ``pattern``; of entries equal to it the first get one.

    Returns:
      ``i32[m]``, ``none`` for entries without a slot; ``i32[]``, the number of slots.
    """

    def of_all(bits: jax.Array, pattern: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = (bits >= pattern) & (bits > 0)
        passed = _bits.running_sum(chosen)
        return jnp.where(chosen, passed - 1, none), passed[-1]

    def of_some(bits: jax.Array, pattern: jax.Array) -> tuple[jax.Array, jax.Array]:
        above = bits > pattern
        tied = (bits == pattern) & (bits > 0)
        # One running sum for both, because a GPU takes several launches for each.
        passed = _bits.running_sum(jnp.stack([above, tied]))
        ties = k - passed[0, -1]
        chosen = above | (tied & (passed[1] <= ties))
        slot = jnp.where(chosen, passed[0] + jnp.minimum(passed[1], ties) - 1, none)
        return slot, passed[0, -1] + jnp.minimum(passed[1, -1], ties)

    # If no ties are left out, a CPU needs only one running sum.
    ties_wait = jnp.sum(bits >= jnp.maximum(pattern, 1), dtype=jnp.int32) > k
    return once(ties_wait, of_some, of_all, bits, pattern)


def bisect_all(x: jax.Array, k: int, found: jax.Array, needed: jax.Array) -> jax.Array:
    """``found``, or the result of a bisection over all of ``x`` if it is ``needed``.

    This is a while loop of possibly no iterations, and not a ``lax.cond``: under vmap a cond
    becomes a select that computes both sides, while a loop still does not iterate if no
    lane needs it.
    """

    def unfinished(carry):
        bit, _ = carry
        return bit >= 0

    def step(carry):
        bit, pattern = carry
        # Tied to the carry; otherwise XLA moves |x| out of the loop, into n words.
        here, candidate = lax.optimization_barrier(
            (x, pattern | (jnp.int32(1) << jnp.maximum(bit, 0)))
        )
        words = _bits.mask_words(
            lambda start, stop: _bits.magnitude_bits(here[start:stop]) >= candidate, x.shape[0]
        )
        count = jnp.sum(_bits.popcount(words), dtype=jnp.int32)
        return bit - 1, jnp.where(count >= k, candidate, pattern)

    first = jnp.where(needed, jnp.int32(_bits.MAGNITUDE_BITS - 1), jnp.int32(-1))
    _, pattern = lax.while_loop(
        unfinished, step, (first, jnp.where(needed, jnp.zeros_like(found), found))
    )
    return pattern


def keep_largest(coo: PaddedCOO, k: int) -> tuple[PaddedCOO, list[PaddedCOO]]:
    """The k entries of ``coo[c]`` of largest magnitude, and the others.

    Both are in the order of ``coo``; among equal magnitudes the first are kept. If all
    entries fit, there is no buffer of others. Otherwise zeros are in neither.
    """
    if coo.capacity <= k:
        return coo, []
    bits = jnp.where(coo.indices < coo.size, _bits.magnitude_bits(coo.values), 0)
    threshold = kth_magnitude_bits(coo.values, k)
    above = bits > threshold
    tied = (bits == threshold) & (bits > 0)
    rank = _bits.running_sum(tied) - 1
    kept = above | (tied & (rank < k - jnp.sum(above, dtype=jnp.int32)))
    largest, _ = _compaction.compact_mask(coo, kept, capacity=k)
    others, _ = _compaction.compact_mask(coo, (bits > 0) & ~kept, capacity=coo.capacity - k)
    return largest, [others]


def smallest_magnitude(coo: PaddedCOO) -> jax.Array:
    """The smallest magnitude of the entries, ``f32[]``; 0 if there are none."""
    bits = _bits.magnitude_bits(coo.values)
    smallest = jnp.min(jnp.where(coo.indices < coo.size, bits, jnp.iinfo(jnp.int32).max))
    return _bits.magnitude_from_bits(jnp.where(coo.count() > 0, smallest, 0))
