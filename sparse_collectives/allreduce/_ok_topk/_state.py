"""The state on which the workers agree: the owners of the indices, and the threshold.

Space repartition, Ok-Topk, section 3.1.1: P regions of the index space with equally many entries.
Each worker cuts the index space so that its own selection falls into P equal parts, and all workers
use the average of these cuts. An average of ascending cuts is ascending.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce._ok_topk._plan import Collective
from sparse_collectives.allreduce._parts import _frame, _hashed, _merge, _messages
from sparse_collectives.select import _thresholds

# The value of ``paper`` with a threshold that is corrected by factors.
CORRECTED = "corrected"


class OkTopkState(NamedTuple):
    """State of :func:`ok_topk`, the same on every worker.

    Attributes:
      count: ``i32[]``, steps taken.
      boundaries: ``i32[P + 1]``, where the regions begin and end; with hashed
        regions in the order of the owners.
      threshold: ``f32[]``, the global threshold of the next step.
      overflowed: ``bool[]``, whether so many entries found no slot that balanced
        regions are cut again at the next step.
    """

    count: jax.Array
    boundaries: jax.Array
    threshold: jax.Array
    overflowed: jax.Array


def first(size: int, workers: int, regions: str) -> OkTopkState:
    """The state before the first step, for n components and P workers."""
    _frame.without_state(size, workers)
    starts = _hashed.starts if regions == "hashed" else equal_regions
    return OkTopkState(
        count=jnp.zeros((), jnp.int32),
        boundaries=starts(size, workers),
        threshold=jnp.zeros((), jnp.float32),
        # The first step cuts the regions, whatever its count.
        overflowed=jnp.ones((), jnp.bool_),
    )


def check(state: OkTopkState, size: int, workers: int) -> None:
    """Raises if a state was made for another number of workers."""
    made_for = state.boundaries.shape[-1] - 1
    if made_for != workers:
        raise ValueError(
            f"state was made for {made_for} workers, but the axis has {workers}. Make a new one "
            f"with init(size={size}, axis_size={workers})."
        )


def next_threshold(
    threshold: jax.Array,
    passed: jax.Array,
    k: int,
    size: int,
    *,
    period: int,
    paper: bool | str,
) -> jax.Array:
    """The threshold that the next step reuses, corrected by the count that it gave."""
    if paper == CORRECTED:
        return _thresholds.next_global(threshold, passed, k)
    if paper or period == 1:
        return threshold
    gain = 1 / max(math.log(size / k), 1.0)
    ratio = jnp.clip(passed / k, 1 / 16, 16.0)
    return threshold * ratio**gain


class Owners(NamedTuple):
    """Which worker owns which index at a step.

    Attributes:
      workers: P.
      boundaries: ``i32[P + 1]``, the boundaries of the regions; None if they are hashed.
      step: ``i32[]``, by which they are hashed.
    """

    workers: int
    boundaries: jax.Array | None
    step: jax.Array

    def cut(self, coo: PaddedCOO, slots: int, turn: jax.Array) -> _merge.Blocks:
        """One block of so many slots for each owner."""
        if self.boundaries is None:
            return _hashed.split(coo, self.workers, slots, self.step, turn)
        return _merge.split(coo, self.boundaries, slots, turn)

    def placed(self, mine: PaddedCOO, size: int, owner: jax.Array) -> PaddedCOO:
        """The sums of ``owner`` at positions, which list the indices owner by owner."""
        if self.boundaries is None:
            return _hashed.to_positions(mine, size, self.workers, owner)
        return mine

    def at_indices(self, entries: PaddedCOO) -> PaddedCOO:
        """The inverse of :meth:`placed`, for the entries of any owners."""
        if self.boundaries is None:
            return _hashed.to_indices(entries, self.workers, self.step)
        return entries


def equal_regions(size: int, workers: int) -> jax.Array:
    """The boundaries of P regions of equal width, ``i32[P + 1]``."""
    return jnp.asarray([worker * size // workers for worker in range(workers + 1)], jnp.int32)


def local_boundaries(coo: PaddedCOO, workers: int) -> jax.Array:
    """Boundaries that put equally many entries of ``coo`` into each region.

    ``coo`` is ascending. With an empty selection the regions have equal width.
    """
    count = coo.count()
    part = jnp.arange(1, workers, dtype=jnp.int32)
    # part * count / workers, without the overflow of the product.
    rank = (count // workers) * part + (count % workers) * part // workers
    inner = coo.indices.at[rank].get(mode="clip")
    equal = equal_regions(coo.size, workers)
    inner = jnp.where(count > 0, inner, equal[1:-1])
    return jnp.concatenate([equal[:1], inner, equal[-1:]])


def agree(
    coo: PaddedCOO,
    state: OkTopkState,
    period: int,
    exchange: Collective,
    axis: AxisName,
) -> tuple[jax.Array, _messages.Words]:
    """Algorithm 1, lines 5 to 7: the consensus, every ``period`` steps and after an overflow.

    Returns:
      ``i32[P + 1]``, equal on all workers; and the words moved.
    """
    workers = transport.axis_size(axis)
    repartition = (state.count % period == 0) | state.overflowed
    boundaries = lax.cond(
        repartition, lambda: consensus(coo, workers, axis), lambda: state.boundaries
    )
    received = jnp.where(repartition, exchange.received(workers), 0.0)
    return boundaries, _messages.words_in_full(received)


def consensus(coo: PaddedCOO, workers: int, axis: AxisName) -> jax.Array:
    """The boundaries averaged over the workers, ``i32[P + 1]``, equal on all.

    The mean is rounded down. It comes from a sum of integers, so it does not depend on
    the order of the workers; quotients and remainders by P are summed separately,
    so that nothing overflows for P up to 46,340.
    """
    inner = local_boundaries(coo, workers)[1:-1]
    parts = jnp.stack([inner // workers, inner % workers])
    quotients, remainders = transport.psum(parts, axis)
    mean = quotients + remainders // workers
    equal = equal_regions(coo.size, workers)
    return jnp.concatenate([equal[:1], mean, equal[-1:]])
