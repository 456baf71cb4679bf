"""Deep Gradient Compression's selection: a sampled threshold, then exact top-k.

Lin et al. 2018 take the k-th magnitude from a small random sample. If more than
k entries pass it, they select exactly among these.

Deviation: the candidates of the second selection have a static number of slots,
four standard deviations of the sample above k.
"""

import math

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, _validation
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector
from sparse_collectives.select import _frame, _topk

# Sampled entries above the k-th magnitude that an estimate of it needs.
_MIN_HITS = 64


def dgc(density: float, *, sample_share: float = 0.01, seed: int = 0) -> Selector:
    r"""Selects at most k entries by a threshold from a random sample.

    The sample has at least :math:`64 / density` entries, drawn with replacement and again at each
    step; if that is n or more, all entries are the sample. The threshold is exact for the sample.
    If fewer than k entries pass it, these are selected; if more, the k largest of them, with ties
    broken by index. Zeros are never selected. NaN counts as larger than infinity, in the sample and
    in the selection, and hides no entry that is larger than the threshold.

    Args:
      density: k / n, in (0, 1]. At 1 every nonzero is selected.
      sample_share: the share of the entries that are sampled, in (0, 1] (0.1 % to
        1 % in the paper). The count varies by ``sqrt(1 / (sample_share k))``.
      seed: the seed of the sample; workers may share it.

    Returns:
      A :class:`Selector` whose buffers have k slots and whose state is ``i32[]``,
      the steps taken. ``info.threshold`` is the threshold of the sample, and
      ``info.overflow`` counts the entries that passed it and were not selected.

    Raises:
      TypeError: density is not a number.
      ValueError: an argument is out of its range.

    Cost: one pass over n entries, 31 over the sample and 31 over the candidates, a few more than k.

    References:
      Lin et al. 2018, "Deep Gradient Compression", section 5 (hierarchical threshold selection).

    Example:
      >>> import jax.numpy as jnp
      >>> selector = dgc(density=0.5)
      >>> coo, _, info = selector.select(jnp.array([1.0, -3.0, 0.5, 2.0]), selector.init(4))
      >>> coo.indices.tolist(), coo.values.tolist()
      ([1, 3], [-3.0, 2.0])
    """
    density = _validation.check_density(density)
    sample_share = _validation.check_number("sample_share", sample_share, 0.0, 1.0)
    if sample_share == 0.0:
        raise ValueError("sample_share must be above 0, got 0. Write for example 0.01 for 1 %.")
    seed = _validation.check_positive_int("seed", seed, minimum=0)

    def choose(acc: jax.Array, k: int, turn: jax.Array):
        size = acc.shape[0]
        sampled = max(math.ceil(sample_share * size), math.ceil(_MIN_HITS * size / k))
        if k == size:
            threshold_bits = jnp.zeros((), jnp.int32)
            coo, count = _compaction.compact(acc, threshold_bits, capacity=k)
        else:
            # 1. The threshold of the sample.
            if sampled >= size:
                threshold_bits = _kth_magnitude.kth_magnitude_bits(acc, k)
            else:
                threshold_bits = _sampled_threshold_bits(acc, k, sampled, seed, turn)
            # 2. The entries that pass it, and the k largest of them.
            slots = min(size, _candidate_slots(k, k * min(sampled, size) / size))
            candidates, count = _compaction.compact(acc, threshold_bits, capacity=slots, turn=turn)
            coo = _largest(candidates, k)
        selected = coo.count()
        threshold = _bits.magnitude_from_bits(threshold_bits)
        return coo, SelectInfo(selected, count - selected, threshold)

    spec = Spec.of("dgc", density=density, sample_share=sample_share, seed=seed)
    return _frame.counted(choose, density, spec)


def _candidate_slots(k: int, hits: float) -> int:
    """Slots for the entries that pass: k and four standard deviations."""
    return math.ceil(k * (1 + 4 / math.sqrt(hits))) + 32


def _sampled_threshold_bits(
    acc: jax.Array, k: int, sampled: int, seed: int, step: jax.Array
) -> jax.Array:
    """The magnitude that the same share of a random sample reaches."""
    size = acc.shape[0]
    key = jax.random.fold_in(_hash.key(seed), step)
    position = jax.random.randint(key, (sampled,), 0, size)
    sample = acc.at[position].get(mode="promise_in_bounds")
    rank = max(1, round(sampled * k / size))
    return _kth_magnitude.bisect(_bits.magnitude_bits(sample), rank)


def _largest(candidates: PaddedCOO, k: int) -> PaddedCOO:
    """The k largest magnitudes among the candidates, ascending by index."""
    places, _ = _topk.select_directly(candidates.values, k)
    indices = candidates.indices.at[places.indices].get(mode="fill", fill_value=candidates.size)
    return PaddedCOO(places.values, indices, candidates.size)
