"""Exact top-k: the k largest magnitudes, ties broken by index.

The previous step gives a guess: a magnitude that somewhat more than k entries reach. One pass
compacts these candidates, and the exact selection is made among them. If the guess fails, which the
count shows, the next guess comes from a sample of this step's entries. The last resort is the exact
k-th magnitude of all n entries.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _validation, _varying
from sparse_collectives._data import Layout, PaddedCOO, as_layout
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector

# The target number of candidates, and slots for them, as multiples of k.
_AIM = 1.15
_CANDIDATES = 1.4
_NONE_BITS = 0x7FFFFFFF
# Attempts to find candidates.
_ATTEMPTS = 4


def topk(density: float) -> Selector:
    r"""Selects exactly the ``k = max(1, round(density * n))`` largest magnitudes.

    Among entries tied at the k-th magnitude, those with the smallest indices are
    taken. Zeros are never selected, so with fewer than k nonzeros the count is
    the number of nonzeros. NaN counts as larger than infinity.

    Cost: one pass over n entries and O(k log n) work in most steps. The state
    holds the guess for the next step; the result does not depend on it.

    Args:
      density: k / n, in (0, 1].

    Returns:
      A :class:`Selector` whose buffers have k slots and whose state is ``f32[]``,
      a magnitude, or 0 if none is known.

    Raises:
      ValueError: density is not in (0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> selector = topk(density=0.5)
      >>> coo, _, info = selector.select(jnp.array([1.0, -3.0, 0.5, 2.0]), selector.init(4))
      >>> coo.indices.tolist(), coo.values.tolist()
      ([1, 3], [-3.0, 2.0])
    """
    density = _validation.check_density(density)

    def init(size: int | Layout) -> jax.Array:
        as_layout(size)
        return jnp.zeros((), jnp.float32)

    def select(acc: jax.Array, state: jax.Array):
        acc = _validation.as_vector("acc", acc)
        # The state varies over the workers; one made in the mapped function lacks that type.
        state = _varying.varying_like(state, acc)
        size = acc.shape[0]
        k = _validation.count_from_density(density, size)
        capacity = math.ceil(_CANDIDATES * k) + 32
        if size <= _kth_magnitude.DIRECT_SIZE or 2 * capacity >= size:
            coo, threshold_bits = select_directly(acc, k)
            selected, guess = coo.count(), state
        else:
            coo, selected, threshold_bits, guess = _select_among_candidates(acc, k, capacity, state)
        info = SelectInfo(
            selected, jnp.zeros_like(threshold_bits), _bits.magnitude_from_bits(threshold_bits)
        )
        return coo, guess, info

    return Selector(init, select, spec=Spec.of("topk", density=density))


def select_directly(acc: jax.Array, k: int) -> tuple[PaddedCOO, jax.Array]:
    """Selects by the exact k-th magnitude of all entries, followed by compaction."""
    threshold_bits = _kth_magnitude.kth_magnitude_bits(acc, k)
    coo, count = _compaction.compact(acc, threshold_bits, capacity=k)
    # More than k entries pass only if several have the k-th magnitude.

    def first_of_ties() -> PaddedCOO:
        end = _end_of_ties(acc, threshold_bits, k)
        return _compaction.compact(acc, threshold_bits, capacity=k, tie_cutoff=end)[0]

    return lax.cond(count > k, first_of_ties, lambda: coo), threshold_bits


def _select_among_candidates(
    acc: jax.Array, k: int, capacity: int, guess: jax.Array
) -> tuple[PaddedCOO, jax.Array, jax.Array, jax.Array]:
    """The selection and its count, the bits of the k-th magnitude, and the next guess."""
    candidates, count, low = _candidates(acc, k, capacity, guess)
    bits = _bits.magnitude_bits(candidates.values)
    threshold_bits = _kth_magnitude.bisect(bits, k)
    slot, selected = _kth_magnitude.slots_from(bits, threshold_bits, k, none=k)
    coo = _compaction.to_slots(candidates, slot, capacity=k)
    low, threshold = (_bits.magnitude_from_bits(x) for x in (low, threshold_bits))
    return coo, selected, threshold_bits, _next_guess(low, count, threshold, k)


def _next_guess(low: jax.Array, count: jax.Array, threshold: jax.Array, k: int) -> jax.Array:
    """The magnitude that 1.15 k entries reach, if the tail does not change.

    Two points of the tail are known: ``count`` entries reach ``low``, and k reach
    ``threshold``. Between and near them the count is modeled as a power of the
    magnitude. If they do not determine one, the guess is 0, which asks for a sample.
    """
    steepness = jnp.log(count / k) / jnp.log(threshold / low)
    guess = low * (count.astype(jnp.float32) / (_AIM * k)) ** (1 / steepness)
    known = (count > k) & (low < threshold) & jnp.isfinite(guess)
    return jnp.where(known, guess, 0.0)


def _candidates(
    acc: jax.Array, k: int, capacity: int, guess: jax.Array
) -> tuple[PaddedCOO, jax.Array, jax.Array]:
    """All entries that reach some magnitude, k or more; their count; the magnitude's bits.

    There are four attempts: the guess, a sample, the exact k-th magnitude, and, if more entries
    have that magnitude than there are slots, the first of them. The count is below k only if
    there are fewer than k nonzeros.
    """
    size = acc.shape[0]

    def failed(carry):
        attempt, low, _, count = carry
        enough = ((count >= k) | (low <= 1)) & (count <= capacity)
        return (attempt < _ATTEMPTS) & ~enough

    def again(carry):
        # Tied to the carry; otherwise XLA moves |acc| out of the loop, into n words.
        here, attempt = lax.optimization_barrier((acc, carry[0]))
        sampled = _kth_magnitude.sampled_magnitude_bits(here, k)
        low = _kth_magnitude.bisect_all(here, k, sampled, attempt >= 2)
        last = attempt == _ATTEMPTS - 1
        end = lax.cond(last, lambda: _end_of_ties(here, low, k), lambda: jnp.full_like(low, size))
        return (
            attempt + 1,
            low,
            *_compaction.compact(here, low, capacity=capacity, tie_cutoff=end),
        )

    # Without a guess nothing passes, and the first attempt fails.
    low = jnp.where(guess > 0, _bits.magnitude_bits(guess), _NONE_BITS)
    first = _compaction.compact(acc, low, capacity=capacity)
    carry = (jnp.ones_like(first[1]), low, *first)
    _, low, candidates, count = lax.while_loop(failed, again, carry)
    return candidates, count, low


def _end_of_ties(acc: jax.Array, threshold_bits: jax.Array, k: int) -> jax.Array:
    """The index up to which entries equal to the threshold are taken, ``i32[]``."""
    above = _bits.mask_by_magnitude(acc, lambda bits: bits > threshold_bits)
    taken = jnp.sum(_bits.popcount(above), dtype=jnp.int32)
    tied = _bits.mask_by_magnitude(acc, lambda bits: bits == threshold_bits)
    return _compaction.nth_position(tied, k - taken - 1)[0] + 1
