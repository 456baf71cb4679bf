"""Global selection: the k largest of all reduced values, wherever they are.

Ok-Topk, section 3.1.2 and lines 9 to 12 of Algorithm 1. The paper finds the
global threshold every tau' steps by gathering all reduced values.

Deviation: this is a radix selection. The 31 bits of a magnitude are fixed from the top, a digit at
a time, by summing histograms over the workers. That moves a small share of k words, so it can run
at every step, and it gives the exact k-th magnitude of the union. Ties go to the first owners and
there to the lowest indices, so that exactly min(k, nonzeros) entries are selected.

One exchange is enough in most steps. With hashed regions a worker owns a random part of all sums:
of the k largest it has k / P, give or take some square roots of that. Therefore it shows a window
of its magnitudes, at ranks around k / P, and the number of magnitudes above. If the k-th largest of
all lies within every window, which the windows show, then all workers have it exactly, and the
number of entries that each delivers. Otherwise the digits follow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce._ok_topk import _plan
from sparse_collectives.allreduce._ok_topk._plan import Collective, Plan
from sparse_collectives.allreduce._parts import _messages

_SMALLEST_NORMAL = 0x00800000
# Above all magnitudes.
_END = 0x7FFFFFFF


def deliverable_bits(reduced: PaddedCOO) -> jax.Array:
    """The magnitudes to select from, ``i32[m]``; 0 for entries that are never delivered.

    Padding, sums that canceled to zero, and subnormal sums are never delivered.
    Some platforms flush subnormals to zero, so they stay in the residuals.
    """
    bits = _bits.magnitude_bits(reduced.values)
    deliverable = (reduced.indices < reduced.size) & (bits >= _SMALLEST_NORMAL)
    return jnp.where(deliverable, bits, 0)


class Seen(NamedTuple):
    """The contents of the windows. All fields are equal on all workers.

    Attributes:
      holds: ``bool[]``, whether the rest can be trusted.
      threshold_bits: ``i32[]``, the bits of the k-th largest magnitude of all workers.
      above: ``i32[P]``, entries of each worker above it.
      tied: ``i32[P]``, entries equal to it that each worker delivers.
      overflow: ``f32[]``, the overflow of all workers.
    """

    holds: jax.Array
    threshold_bits: jax.Array
    above: jax.Array
    tied: jax.Array
    overflow: jax.Array

    @property
    def quota(self) -> jax.Array:
        """How many each worker delivers, ``i32[P]``."""
        return self.above + self.tied


def look(bits: jax.Array, plan: Plan, overflow: jax.Array, axis: AxisName) -> Seen:
    """One allgather of ``plan.window`` words and a few.

    Args:
      bits: ``i32[m]``, from :func:`deliverable_bits`.
      plan: the slots, with a window.
      overflow: ``i32[]``, this worker's overflow, which travels with the window.
      axis: the workers.

    Cost: in addition to the exchange, a bisection over m magnitudes for both ends of the window at
    once, and one over all windows.
    """
    slots, size = plan.window, bits.shape[0]
    first, last = plan.window_ranks
    ranks = jnp.asarray([first, last], jnp.int32)
    (high, low), (above, _) = jax.vmap(_kth_magnitude.bisect_and_count, in_axes=(None, 0))(
        bits, ranks
    )
    if not first:
        # From rank 0 on all may be shown.
        high, above = jnp.full_like(high, _END), jnp.zeros_like(above)

    def in_window(start, stop):
        part = bits[start:stop]
        return (part >= jnp.maximum(low, 1)) & (part < high)

    places, shown = _compaction.set_positions(_bits.mask_words(in_window, size), slots, size)
    window = bits.at[places].get(mode="fill", fill_value=0)
    # With the upper ends inverted, one maximum finds the smallest of them.
    numbers = jnp.stack([above, shown, overflow, low, ~high])
    gathered = transport.all_gather(jnp.concatenate([window, numbers]), axis)
    windows, numbers = gathered[:, :slots], gathered[:, slots:]
    known, inside, *_ = jnp.sum(numbers, axis=0, dtype=jnp.int32)
    _, fullest, _, low, high = jnp.max(numbers, axis=0)

    least = jnp.minimum(plan.k, known + inside)
    wanted = jnp.where(low == 0, least, plan.k) - known
    threshold = _kth_magnitude.bisect(windows.reshape(-1), wanted)
    holds = (low <= threshold) & (threshold < ~high) & (fullest <= slots)
    over = jnp.sum(windows > threshold, axis=1, dtype=jnp.int32)
    equal = jnp.sum(windows == threshold, axis=1, dtype=jnp.int32)
    above = numbers[:, 0] + over
    before = jnp.cumsum(equal, dtype=jnp.int32) - equal
    rest = plan.k - jnp.sum(above, dtype=jnp.int32)
    return Seen(
        holds=holds & (wanted > 0) & (threshold > 0),
        threshold_bits=threshold,
        above=above,
        tied=jnp.clip(rest - before, 0, equal),
        overflow=jnp.sum(numbers[:, 2].astype(jnp.float32)),
    )


def global_threshold(bits: jax.Array, k: int, axis: AxisName) -> jax.Array:
    """The k-th largest magnitude over all workers, ``i32[]``, equal on all.

    Args:
      bits: ``i32[m]``, from :func:`deliverable_bits`.
      k: how many entries are wanted in all.
      axis: the workers.

    Returns:
      The bits of the k-th largest nonzero magnitude, or of the smallest one if
      there are fewer than k; 0 if there is none.
    """
    prefix = jnp.int32(0)
    wanted = None
    for shift, width in _plan.digits(k):
        buckets = 1 << width
        digit = (bits >> shift) & (buckets - 1)
        known = shift + width
        matches = (bits > 0) & ((bits >> known) == prefix)
        digit = jnp.where(matches, digit, buckets)
        local = jnp.zeros((buckets,), jnp.int32).at[digit].add(1, mode="drop")
        histogram = transport.psum(local, axis)
        at_least = jnp.cumsum(histogram[::-1], dtype=jnp.int32)[::-1]
        wanted = jnp.minimum(k, at_least[0]) if wanted is None else wanted
        # The largest digit that still has enough entries at or above it.
        chosen = jnp.sum(at_least >= jnp.maximum(wanted, 1), dtype=jnp.int32) - 1
        chosen = jnp.maximum(chosen, 0)
        wanted = wanted - (at_least[chosen] - histogram[chosen])
        prefix = (prefix << width) | chosen
    return prefix


def current_threshold(
    bits: jax.Array,
    k: int,
    reused: jax.Array,
    period: int,
    step: jax.Array,
    exchanges: Sequence[Collective],
    axis: AxisName,
    published: Collective | None = None,
) -> tuple[jax.Array, _messages.Words]:
    """Algorithm 1, lines 9 to 12: the exact threshold once in a period, else the reused one.

    Args:
      bits: ``i32[m]``, from :func:`deliverable_bits`.
      k: how many entries are wanted in all.
      reused: ``f32[]``, the threshold to reuse; 0 if there is none.
      period: tau', steps between two exact evaluations.
      step: ``i32[]``, steps taken.
      exchanges: the histograms.
      axis: the workers.
      published: the allgather of line 10, which the histograms replace; its pairs count as
        useful instead of them. None: the histograms count.

    Returns:
      ``i32[]``, the bits of the threshold, equal on all workers; and the words moved.
    """
    workers = transport.axis_size(axis)
    received = sum(exchange.received(workers) for exchange in exchanges)
    words = _messages.words_in_full(received)
    if published is not None:
        sums = jnp.sum(bits > 0, dtype=jnp.int32)
        gathered = _messages.words_of_pairs(published.received(workers), sums, published.slots)
        words = words._replace(useful=gathered.useful)
    if period == 1:
        return global_threshold(bits, k, axis), words
    evaluate = (step % period == 0) | (reused <= 0)
    threshold_bits = lax.cond(
        evaluate,
        lambda: global_threshold(bits, k, axis),
        lambda: _bits.magnitude_bits(reused),
    )
    return threshold_bits, jax.tree.map(lambda x: jnp.where(evaluate, x, 0.0), words)


class GlobalSelection(NamedTuple):
    """Which reduced entries are delivered.

    Attributes:
      mask: ``bool[m]`` over this worker's entries.
      quota: ``i32[P]``, how many each worker delivers; at most k in all.
      passed: ``i32[]``, entries of all workers that reach the threshold.
      overflow: ``f32[]``, the overflow of all workers; their sum may pass 2**31.

    All but the mask are equal on all workers.
    """

    mask: jax.Array
    quota: jax.Array
    passed: jax.Array
    overflow: jax.Array


def select_global(
    bits: jax.Array,
    threshold_bits: jax.Array,
    k: int,
    overflow: jax.Array,
    axis: AxisName,
    turn: jax.Array,
) -> GlobalSelection:
    """Selects the entries that reach the threshold, k at most over all workers.

    Entries above the threshold come first, then entries equal to it, in the
    order of the workers and of their entries. If more than k are above it (a reused
    threshold may be too low), the k are shared out evenly over the workers, and which of a
    worker's entries wait changes from step to step.

    Args:
      bits: ``i32[m]``, from :func:`deliverable_bits`.
      threshold_bits: ``i32[]``, equal on all workers.
      k: how many in all.
      overflow: ``i32[]``, this worker's overflow, which travels with the counts.
      axis: the workers.
      turn: ``u32[]``, from :func:`._hash.turn`.
    """
    above = bits > jnp.maximum(threshold_bits, 0)
    tied = (bits == threshold_bits) & (bits > 0)
    local = [jnp.sum(above, dtype=jnp.int32), jnp.sum(tied, dtype=jnp.int32), overflow]
    above_counts, tied_counts, overflows = transport.all_gather(jnp.stack(local), axis).T
    above_quota = _even_share(above_counts, k)
    tied_quota = _share(tied_counts, k - jnp.sum(above_quota, dtype=jnp.int32))
    me = transport.axis_index(axis)
    count = above_counts[me]
    start = jnp.where(count > above_quota[me], _hash.below(turn, count), 0)
    place = _rank(above) - start
    place = jnp.where(place < 0, place + count, place)
    mask = (above & (place < above_quota[me])) | (tied & (_rank(tied) < tied_quota[me]))
    return GlobalSelection(
        mask=mask,
        quota=above_quota + tied_quota,
        passed=jnp.sum(above_counts, dtype=jnp.int32) + jnp.sum(tied_counts, dtype=jnp.int32),
        overflow=jnp.sum(overflows.astype(jnp.float32)),
    )


def _even_share(counts: jax.Array, available: int) -> jax.Array:
    """The part of each of ``counts`` that fits ``available``, with the largest cut to one level.

    Serving the workers in order would fill the first ones beyond their slots of the
    allgather, and leave the slots of the last ones empty.
    """
    workers = counts.shape[0]
    ascending = jnp.sort(counts)
    others = workers - jnp.arange(workers, dtype=jnp.int32)
    # The level for the other workers, once all with fewer entries have theirs.
    levels = (available - (jnp.cumsum(ascending, dtype=jnp.int32) - ascending)) // others
    level = jnp.max(jnp.minimum(ascending, levels))
    share = jnp.minimum(counts, level)
    rest = available - jnp.sum(share, dtype=jnp.int32)
    more = counts > level
    return share + (more & (_rank(more) < rest)).astype(jnp.int32)


def _share(counts: jax.Array, available: jax.Array | int) -> jax.Array:
    """The part of each of ``counts`` that fits into ``available``, served in order."""
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    return jnp.clip(available - before, 0, counts)


def _rank(mask: jax.Array) -> jax.Array:
    return jnp.cumsum(mask, dtype=jnp.int32) - 1
