"""Complete sums: what all workers have of an index that any of them selected.

Every worker knows the same indices. Each adds all that it has there, and keeps nothing
but what rounding, or a cut to its share of the range, took off.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _volumes, transport
from sparse_collectives._coo import _bitset
from sparse_collectives._types import AxisName, Undelivered
from sparse_collectives.allreduce._shared import _fixed_point, _range, _undelivered
from sparse_collectives.padded_coo import PaddedCOO


class Complete(NamedTuple):
    """The sums at some indices.

    Attributes:
      total: a PaddedCOO in the order of the indices, the same on every worker.
      undelivered: what this worker keeps.
    """

    total: PaddedCOO
    undelivered: Undelivered


def within_range(values: jax.Array, workers: int) -> jax.Array:
    """Each value, cut to the share of its dtype's range that one of P workers may send."""
    if workers == 1:
        return values
    share = jnp.asarray(_range.largest_share(values.dtype, workers), values.dtype)
    # What is not finite is seen as it is.
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -share, share), values)


def sum_at(
    indices: jax.Array,
    acc: jax.Array | None,
    coo: PaddedCOO,
    axis: AxisName,
    step: jax.Array | None = None,
    bits: int = 32,
    gives: jax.Array | None = None,
) -> Complete:
    """One psum of what all workers have at ``indices``.

    Args:
      indices: ``i32[K]``, the same on every worker, unique but for padding.
      acc: ``f[n]``, what this worker has; None: what it has selected, and nothing else is
        its own to give or to clear.
      coo: its selection.
      axis: the workers.
      step: ``f32[K]``, the same on every worker: values are sent as multiples of it. None: as
        they are.
      bits: of a value, with a step.
      gives: ``bool[]``, whether this worker gives anything; None: it does.
    """
    workers, size = transport.axis_size(axis), coo.size
    held = coo.to_dense() if acc is None else acc
    # Unsigned: else jax asks of each index whether it counts from the end.
    mine = held.at[indices.astype(jnp.uint32)].get(mode="fill", fill_value=0)
    if gives is not None:
        mine = jnp.where(gives, mine, 0)
    sent = within_range(mine, workers)
    if step is None:
        total = transport.psum(sent.astype(jnp.float32), axis)
        kept = jnp.where(sent == mine, 0, mine - sent)
    else:
        largest = _fixed_point.half(bits, workers)
        whole = _fixed_point.rounded(sent, step, largest)
        words = _fixed_point.pack(whole, largest, bits)
        words = transport.psum(words, axis)
        sums = _fixed_point.unpack(words, indices.shape[0], largest, bits, workers)
        total = sums.astype(jnp.float32) * step
        # Whole multiples of a step, which float32 has all the bits of.
        kept = mine.astype(jnp.float32) - whole.astype(jnp.float32) * step
    # What is not finite reaches everyone, and nobody keeps it.
    kept = jnp.where(jnp.isfinite(total), kept, 0).astype(coo.values.dtype)
    total = jnp.where(indices < size, total, 0).astype(coo.values.dtype)
    cleared = indices
    if acc is None:
        selected = _bitset.insert(_bitset.empty(size), coo.indices, size)
        cleared = jnp.where(_bitset.contains(selected, indices), indices, size)
    if gives is not None:
        cleared = jnp.where(gives, cleared, size)
    undelivered = _undelivered.of_slots(coo, coo.values)
    return Complete(
        PaddedCOO(total, indices, size),
        undelivered._replace(remainder=PaddedCOO(kept, cleared, size)),
    )


def sum_words(slots: int, workers: int, bits: int) -> float:
    """Words that :func:`sum_at` makes each worker receive."""
    return _volumes.all_reduce(-(-slots // (32 // bits)), workers)
