"""The global selection in one exchange: each worker shows its entries near the threshold.

With hashed regions a worker owns a random part of all sums: of the k largest it has
k / P, give or take some square roots of that. Therefore it shows a window of its magnitudes, at
ranks around k / P, and the number of magnitudes above. If the k-th largest of all lies within every
window, which the windows show, then all workers have it exactly, and the number of entries that
each delivers. Otherwise :mod:`._global_selection` follows.

This deviates from the paper, which gathers all reduced values every tau' steps, and reuses the
threshold in between.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce._ok_topk._plan import Plan

# Above all magnitudes.
_END = 0x7FFFFFFF


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
      bits: ``i32[m]``, from :func:`._global_selection.deliverable_bits`.
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
