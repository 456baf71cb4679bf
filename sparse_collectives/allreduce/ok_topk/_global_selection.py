"""Global selection: the k largest of all reduced values, wherever they are.

Ok-Topk, section 3.1.2 and line 9 to 12 of Algorithm 1. The paper finds the
global threshold every tau' steps by gathering all reduced values.

Deviation: a radix selection. The 31 bits of a magnitude are fixed from the top,
a digit at a time, by summing histograms over the workers. It moves a small
share of k words, so it can run at every step, and it gives the exact k-th
magnitude of the union. Ties go to the lowest indices, so that exactly
min(k, nonzeros) entries are selected.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _volumes, transport
from sparse_collectives._coo import _bits
from sparse_collectives._types import AxisName
from sparse_collectives.padded_coo import PaddedCOO

# Digit widths to choose from: wide ones need fewer rounds, and more words.
_WIDTHS = (11, 8, 4)
_MAX_SHARE = 1 / 5
_SMALLEST_NORMAL = 0x00800000


def digits(k: int) -> tuple[tuple[int, int], ...]:
    """The (shift, width) of each digit, from the top.

    The widest digits whose histograms take at most a fifth of k words.
    """
    for width in _WIDTHS:
        shifts = range(_bits.MAGNITUDE_BITS, 0, -width)
        plan = tuple((max(0, top - width), min(width, top)) for top in shifts)
        if sum(2 << bits for _, bits in plan) <= _MAX_SHARE * k:
            break
    return plan


def deliverable_bits(reduced: PaddedCOO) -> jax.Array:
    """The magnitudes to select from, ``i32[m]``; 0 for what is never delivered.

    That is padding, sums that cancelled to zero, and subnormal sums: arithmetic
    on them flushes to zero on some platforms, so they stay in the residuals.
    """
    bits = _bits.magnitude_bits(reduced.values)
    deliverable = (reduced.indices < reduced.size) & (bits >= _SMALLEST_NORMAL)
    return jnp.where(deliverable, bits, 0)


def global_threshold(bits: jax.Array, k: int, axis: AxisName) -> jax.Array:
    """The k-th largest magnitude over all workers, ``i32[]``, equal on all.

    Args:
      bits: ``i32[m]``, from :func:`deliverable_bits`.
      k: how many entries are wanted in all.
      axis: the workers.

    Returns:
      The bits of the k-th largest nonzero magnitude, or of the smallest one where
      there are fewer than k; 0 where there is none.
    """
    prefix = jnp.int32(0)
    wanted = None
    for shift, width in digits(k):
        buckets = 1 << width
        digit = (bits >> shift) & (buckets - 1)
        known = shift + width
        matches = (bits > 0) & ((bits >> known) == prefix)
        digit = jnp.where(matches, digit, buckets)
        local = jnp.zeros((buckets,), jnp.int32).at[digit].add(1, mode="drop")
        histogram = transport.psum(local, axis)
        at_least = jnp.cumsum(histogram[::-1])[::-1]
        wanted = jnp.minimum(k, at_least[0]) if wanted is None else wanted
        # The largest digit that still has enough entries at or above it.
        chosen = jnp.sum(at_least >= jnp.maximum(wanted, 1), dtype=jnp.int32) - 1
        chosen = jnp.maximum(chosen, 0)
        wanted = wanted - (at_least[chosen] - histogram[chosen])
        prefix = (prefix << width) | chosen
    return prefix


class GlobalSelection(NamedTuple):
    """Which reduced entries are delivered.

    Attributes:
      mask: ``bool[m]`` over this worker's entries.
      quota: ``i32[P]``, how many each worker delivers; at most k in all.
      passed: ``i32[]``, entries of all workers that reach the threshold.
      overflow: ``f32[]``, the overflow of all workers (their sum may pass 2**31). All
        but the mask are equal on all workers.
    """

    mask: jax.Array
    quota: jax.Array
    passed: jax.Array
    overflow: jax.Array


def select_global(
    bits: jax.Array, threshold_bits: jax.Array, k: int, overflow: jax.Array, axis: AxisName
) -> GlobalSelection:
    """Selects the entries that reach the threshold, k at most over all workers.

    Entries above the threshold come first; of those equal to it the first in the
    order of the workers, which is that of the indices.

    Args:
      bits: ``i32[m]``, from :func:`deliverable_bits`, ascending in index.
      threshold_bits: ``i32[]``, equal on all workers.
      k: how many in all.
      overflow: ``i32[]``, this worker's overflow, which travels along.
      axis: the workers.
    """
    above = bits > jnp.maximum(threshold_bits, 0)
    tied = (bits == threshold_bits) & (bits > 0)
    local = [jnp.sum(above, dtype=jnp.int32), jnp.sum(tied, dtype=jnp.int32), overflow]
    above_counts, tied_counts, overflows = transport.all_gather(jnp.stack(local), axis).T
    # More than k above the threshold happen only where it was reused.
    above_quota = _share(above_counts, k)
    tied_quota = _share(tied_counts, k - jnp.sum(above_quota))
    me = transport.axis_index(axis)
    mask = (above & (_rank(above) < above_quota[me])) | (tied & (_rank(tied) < tied_quota[me]))
    return GlobalSelection(
        mask=mask,
        quota=above_quota + tied_quota,
        passed=jnp.sum(above_counts) + jnp.sum(tied_counts),
        overflow=jnp.sum(overflows.astype(jnp.float32)),
    )


def _share(counts: jax.Array, available: jax.Array | int) -> jax.Array:
    """How many of ``counts`` fit into ``available``, first come first served."""
    before = jnp.cumsum(counts) - counts
    return jnp.clip(available - before, 0, counts)


def _rank(mask: jax.Array) -> jax.Array:
    return jnp.cumsum(mask, dtype=jnp.int32) - 1


def threshold_words(k: int, workers: int) -> float:
    """Words that :func:`global_threshold` makes each worker receive."""
    return sum(_volumes.all_reduce(1 << width, workers) for _, width in digits(k))


def selection_words(workers: int) -> float:
    """Words that :func:`select_global` makes each worker receive."""
    return _volumes.all_gather(3, workers)
