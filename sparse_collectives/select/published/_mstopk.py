"""MSTopK: top-k by a fixed number of threshold samplings.

Algorithm 1 of Shi et al. A binary search between the mean and the maximum of
|acc| keeps the two thresholds that bracket k: the lowest that at most k entries
reach, and the highest that more than k reach. All entries above the upper
threshold are taken, and the rest of the k entries from between the two.

The search counts the entries that reach a threshold. The paper counts among all n entries at each
sampling. Here a sample gives a magnitude that somewhat more than k entries reach; these are
compacted once, and every count is made among them. For a threshold above that magnitude the count
is the same; for a threshold below it, the count is known to be more than k.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, _validation
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector
from sparse_collectives.select import _frame, _statistics

_LARGEST_BITS = 0x7FFFFFFF
_ALL_ONES = 0xFFFFFFFF
# Slots for the candidates, as a multiple of k.
_CANDIDATES = 1.75


class _Bracket(NamedTuple):
    """The state of the binary search, after line 6 of Algorithm 1.

    Attributes:
      left: ``f32[]``, the threshold at l: more than k entries reach it.
      right: ``f32[]``, the threshold at r: at most k do.
      lower: ``i32[]``, bits of thres2, the highest that more than k reach.
      top: ``i32[]``, the largest bits below thres1, the lowest that at most k
        reach. Before one is found, they are the bits of the largest finite number.
    """

    left: jax.Array
    right: jax.Array
    lower: jax.Array
    top: jax.Array


def mstopk(density: float, *, samplings: int = 30) -> Selector:
    r"""Selects the k largest entries, or nearly the largest, by ``samplings`` thresholds.

    With :math:`a` the mean and :math:`u` the maximum of |acc|, the thresholds are
    :math:`a + \rho (u - a)`, with the ratio :math:`\rho` found by binary search. The entries that
    are missing from ``k = max(1, round(density * n))`` come from between the last two thresholds: a
    run of consecutive ones, which begins at another place at each step. The selection always has
    exactly k entries, or all nonzeros if there are fewer; it never has zeros.

    Deviations: the run begins at a hash of the step count and may wrap around, so that every index
    is sent eventually. The mean and the maximum are taken over the finite entries; infinities and
    NaN are above all thresholds. The search compares in float32, so magnitudes that the platform
    flushes to zero (subnormals) fall between the last two thresholds.

    Args:
      density: k / n, in (0, 1].
      samplings: N, the number of halvings of the search. The paper takes 30, which finds the exact
        top-k unless the maximum is 2**30 times the difference between the entries near the k-th.
        Each sampling fewer doubles the share that is taken by position.

    Returns:
      A :class:`Selector` whose buffers have k slots and whose state is ``i32[]``,
      the number of steps. ``info.threshold`` is the lower threshold.

    Raises:
      ValueError: an argument is out of its range.

    Cost: six passes over n entries (maximum, mean, candidates, entries that are not
    finite, and the masks of the two thresholds), N over about 1.5 k candidates,
    O(k log n). N more over n if the sample misleads, which the count shows, or if so
    many entries are equal that the candidates find no room.

    References:
      Shi et al., Towards Scalable Distributed Training of Deep Learning on Public
      Cloud Clusters, MLSys 2021, section 3.1.

    Example:
      >>> import jax.numpy as jnp
      >>> selector = mstopk(density=0.5)
      >>> coo, _, info = selector.select(jnp.array([1.0, -3.0, 0.5, 2.0]), selector.init(4))
      >>> coo.indices.tolist(), coo.values.tolist()
      ([1, 3], [-3.0, 2.0])
    """
    density = _validation.check_density(density)
    samplings = _validation.check_positive_int("samplings", samplings)

    def choose(acc: jax.Array, k: int, turn: jax.Array):
        bracket = _search(acc, k, samplings)
        coo, count = _compaction.entries_at(acc, _words_between(acc, bracket, k, turn), k)
        info = SelectInfo(count, jnp.zeros_like(count), _bits.magnitude_from_bits(bracket.lower))
        return coo, info

    return _frame.counted(choose, density, Spec.of("mstopk", density=density, samplings=samplings))


def _search(acc: jax.Array, k: int, samplings: int) -> _Bracket:
    """Lines 1 to 24: the two thresholds after the last sampling."""
    size = acc.shape[0]
    # Lines 2 and 3.
    extent = _statistics.extent(acc)
    mean = extent.mean(size)
    bottom = jnp.ones_like(_bits.magnitude_bits(mean))
    start = _Bracket(mean, extent.largest, bottom, bottom * (_bits.INFINITY_BITS - 1))
    low, candidates, count = _candidates(acc, k)
    bits = _bits.magnitude_bits(candidates)

    def sample(bracket: _Bracket, reached_by) -> _Bracket:
        # Halving the ratio halves the interval of thresholds. The paper's mean + ratio *
        # (maximum - mean) rounds once or twice, depending on the compiler. If it is computed
        # twice, the threshold that is counted may differ from the one that is kept. Here the
        # products are exact, so it rounds once. The larger one, as halves may be flushed to zero.
        middle = bracket.left * 0.5 + bracket.right * 0.5
        threshold = jnp.maximum(middle, bracket.left)
        # Zeros reach no threshold, not even one of 0.
        pattern = jnp.maximum(_bits.magnitude_bits(threshold), 1)
        more = reached_by(pattern) > k
        # Thresholds only rise on the left and fall on the right, so the last one
        # of each side is the best: thres1 and thres2 need no k1 and k2.
        return _Bracket(
            jnp.where(more, threshold, bracket.left),
            jnp.where(more, bracket.right, threshold),
            jnp.where(more, pattern, bracket.lower),
            jnp.where(more, bracket.top, pattern - 1),
        )

    def among_candidates(pattern):
        return jnp.sum(bits >= pattern, dtype=jnp.int32)

    def unfinished(carry):
        return carry[0] < samplings

    def among_all(carry):
        # Tied to the carry; otherwise XLA moves |acc| out of the loop, into n words.
        here, turn = lax.optimization_barrier((acc, carry[0]))
        return turn + 1, sample(carry[1], lambda pattern: _statistics.count_reaching(here, pattern))

    if candidates.shape[0] == size:
        found, usable = start, bottom < 0
    else:
        found = lax.fori_loop(0, samplings, lambda _, b: sample(b, among_candidates), start)
        # Below ``low`` the count exceeds k only if more than k reach ``low``, or all do.
        usable = ((count > k) | (low <= 1)) & (count <= candidates.shape[0])
    # A while loop without turns instead of a ``lax.cond``, which computes both under vmap.
    begun = jax.tree.map(lambda a, b: jnp.where(usable, a, b), found, start)
    turn = jnp.where(usable, jnp.int32(samplings), jnp.int32(0))
    _, bracket = lax.while_loop(unfinished, among_all, (turn, begun))
    # More than k infinities and NaN: all thresholds were below them.
    finite = jnp.int32(_bits.INFINITY_BITS - 1)
    flooded = (bracket.top == finite) & (_statistics.count_reaching(acc, finite + 1) > k)
    return bracket._replace(
        lower=jnp.where(flooded, _bits.INFINITY_BITS, bracket.lower),
        top=jnp.where(flooded, _LARGEST_BITS, bracket.top),
    )


def _candidates(acc: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A magnitude's bits, the values that reach it, and their count.

    If n is small, or k is near n, all values are returned.
    """
    size = acc.shape[0]
    capacity = math.ceil(_CANDIDATES * k) + 32
    if size <= _kth_magnitude.DIRECT_SIZE or 2 * capacity >= size:
        none = jnp.zeros_like(acc[0], jnp.int32)
        return none, acc, none + size
    low = _kth_magnitude.sampled_magnitude_bits(acc, k)
    candidates, count = _compaction.compact(acc, low, capacity=capacity)
    return low, candidates.values, count


def _words_between(acc: jax.Array, bracket: _Bracket, k: int, turn: jax.Array) -> jax.Array:
    """Lines 25 to 28: all entries above the bracket, and the missing ones from within it."""
    above = _bits.mask_by_magnitude(acc, lambda bits: bits > bracket.top)
    within = _bits.mask_by_magnitude(
        acc, lambda bits: (bits >= bracket.lower) & (bits <= bracket.top)
    )
    missing = k - jnp.sum(_bits.popcount(above), dtype=jnp.int32)
    count = jnp.sum(_bits.popcount(within), dtype=jnp.int32)
    # The ranks of the first and the last of the run: a window of ``missing``.
    ends = jnp.stack([jnp.zeros_like(missing), missing - 1])
    start = _hash.below(turn, count)
    wraps = start + missing > count
    ranks = (start + ends) % jnp.maximum(count, 1)
    positions, _ = _compaction.nth_position(within, ranks)
    from_first = ~_bits_below(positions[0], within)
    to_last = _bits_below(positions[1] + 1, within)
    run = jnp.where(wraps, from_first | to_last, from_first & to_last)
    run = jnp.where(count > missing, run, jnp.uint32(_ALL_ONES))
    return above | jnp.where(missing > 0, within & run, jnp.uint32(0))


def _bits_below(position: jax.Array, words: jax.Array) -> jax.Array:
    """A mask of all entries before ``position``, in the shape of ``words``."""
    first = 32 * jnp.arange(words.shape[0], dtype=jnp.int32)
    width = jnp.clip(position - first, 0, 32).astype(jnp.uint32)
    partial = (jnp.uint32(1) << jnp.minimum(width, 31)) - 1
    return jnp.where(width < 32, partial, jnp.uint32(_ALL_ONES))
