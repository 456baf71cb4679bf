"""The part of a total that is applied: the mean, within the limit and the dtypes of the leaves."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._error_feedback import _buffers, _layout, _sparse_state
from optax_ext._error_feedback._contract import Accumulated, Options, Reduced
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from sparse_collectives import AxisName, PaddedCOO, Undelivered, _varying, extend, transport
from sparse_collectives._sparse_ops import to_dense


def mean_of(
    total: PaddedCOO | jax.Array,
    layout: _layout.TreeLayout,
    *,
    axis: AxisName,
    shard_axis: AxisName,
    limit: jax.Array | None,
    saturates: bool,
) -> tuple[jax.Array, Any, jax.Array]:
    """The total over P, ``f32[m]``, and the part of it that is not applied.

    An update may exceed the limit, and a 16-bit leaf rounds its update and may be too narrow for
    it. The part that is cut off is the same on every worker. Each worker keeps it, multiplied by
    the number of shards, so that over the workers the residuals sum to P times this part.

    Args:
      total: the sum over all workers, or a shard of it.
      layout: the layout of the leaves.
      axis: the axis of all workers.
      shard_axis: the axis over which the buffer is divided; ``()`` for none.
      limit: ``f32[]``; 75 % of the excess of an entry over it is kept. None: no limit.
      saturates: whether finite numbers stay finite.

    Returns:
      The mean; the part that this worker keeps, as :attr:`Kept.rounding`; ``i32[]``, the number of
      entries that are too large for their leaves.
    """
    workers = transport.axis_size(axis)

    def part(mean: jax.Array, index: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _part_of(
            mean, index, layout, shard_axis=shard_axis, limit=limit, saturates=saturates
        )

    if not isinstance(total, PaddedCOO):
        mean = total.astype(jnp.float32) / workers
        if not rounds(layout, limit):
            return mean, (), jnp.zeros((), jnp.int32)
        return part(mean, None)
    size = total.size
    values, rounding = total.values.astype(jnp.float32) / workers, ()
    saturated = jnp.zeros((), jnp.int32)
    if rounds(layout, limit):
        values, off, saturated = part(values, total.indices)
        rounding = PaddedCOO(off, total.indices, size)
    return to_dense(PaddedCOO(values, total.indices, size)), rounding, saturated


def in_leaves(
    mean: jax.Array, layout: _layout.TreeLayout, *, shard_axis: AxisName, saturates: bool
) -> tuple[jax.Array, Any, jax.Array]:
    """As :func:`mean_of`, for the mean of a whole buffer, or a shard of it, without a limit."""
    if not narrows(layout):
        return mean, (), jnp.zeros((), jnp.int32)
    return _part_of(mean, None, layout, shard_axis=shard_axis, limit=None, saturates=saturates)


def _part_of(
    mean: jax.Array,
    index: jax.Array | None,
    layout: _layout.TreeLayout,
    *,
    shard_axis: AxisName,
    limit: jax.Array | None,
    saturates: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The part of a mean that is applied, as :func:`mean_of`, for means ``f32[m]`` at an index.

    An index is a position in the shard, from the size of the shard on for an empty slot; None:
    ``mean`` is the whole shard.
    """
    kept, saturated = _limited(mean, limit), jnp.zeros((), jnp.int32)
    if narrows(layout):
        shards = transport.axis_size(shard_axis)
        size = math.ceil(layout.size / shards)
        if shard_axis and index is None:
            index = jnp.arange(size, dtype=jnp.int32)
        if index is not None:
            first = transport.axis_index(shard_axis) * size if shard_axis else 0
            index = jnp.where(index < size, index + first, -1)
        kept, large = held(kept, index, layout, saturate=saturates)
        saturated = jnp.sum(large & saturates, dtype=jnp.int32)
    # By policy the update has the numbers that are not finite; nothing of them can be kept.
    off = jnp.where(jnp.isfinite(kept), mean - kept, 0.0)
    return kept, off * jnp.float32(transport.axis_size(shard_axis)), saturated


def _limited(mean: jax.Array, limit: jax.Array | None) -> jax.Array:
    """``mean`` up to the limit, plus 25 % of the excess.

    With a hard limit, residuals would grow without bound if the updates that accumulate between
    two deliveries of an entry exceed the limit. With 25 % of the excess, the residual after a
    delivery is at most three times the largest sum that accumulated between two deliveries.
    """
    if limit is None:
        return mean
    beyond = mean - jnp.clip(mean, -limit, limit)
    return jnp.where(jnp.isfinite(mean), mean - 0.75 * beyond, mean)


def rounds(layout: _layout.TreeLayout, limit: Any) -> bool:
    """Whether a part of a mean may be left for the residuals of all workers."""
    return limit is not None or narrows(layout)


def narrows(layout: _layout.TreeLayout) -> bool:
    """Whether a leaf of the sparse buffer is narrower than float32."""
    return any(dtype != jnp.float32 for _, dtype in _buffers.dtype_runs(layout))


def held(
    mean: jax.Array, index: jax.Array | None, layout: _layout.TreeLayout, *, saturate: bool
) -> tuple[jax.Array, jax.Array]:
    """``mean`` as the dtypes of the leaves can represent it, and which entries exceed their range.

    The program for entries at an ``index`` has a few operations for each dtype instead of each
    leaf, since leaves of different dtypes may alternate hundreds of times.

    Args:
      mean: ``f32[m]``.
      index: ``i32[m]``, the position of each entry in the sparse buffer, negative for an empty
        slot; None: ``mean`` is the whole buffer, which is cut into runs of one dtype.
      layout: the layout of the leaves.
      saturate: whether finite numbers stay finite.

    Returns:
      ``f32[m]`` and ``bool[m]``.
    """
    runs = _buffers.dtype_runs(layout)
    stops, dtypes = [stop for stop, _ in runs], [dtype for _, dtype in runs]
    if len(runs) == 1:
        return _in_one_dtype(mean, dtypes[0], saturate)
    if index is None:
        starts = [0, *stops[:-1]]
        parts = [
            _in_one_dtype(mean[start:stop], dtype, saturate)
            for start, stop, dtype in zip(starts, stops, dtypes, strict=True)
        ]
        kept, large = (jnp.concatenate(each) for each in zip(*parts, strict=True))
        return kept, large
    # A search without a loop, which is one kernel on a GPU.
    run = jnp.searchsorted(np.asarray(stops, np.int32), index, side="right", method="scan_unrolled")
    kinds = list(dict.fromkeys(dtypes))
    numbers = np.asarray([kinds.index(dtype) for dtype in dtypes], np.int32)
    kind = jnp.asarray(numbers).at[run].get(mode="clip")
    kept, large = mean, jnp.zeros(mean.shape, jnp.bool_)
    for number, dtype in enumerate(kinds):
        in_kind = kind == number
        narrow, beyond = _in_one_dtype(mean, dtype, saturate)
        kept, large = jnp.where(in_kind, narrow, kept), large | (in_kind & beyond)
    return kept, large


def _in_one_dtype(mean: jax.Array, dtype, saturate: bool) -> tuple[jax.Array, jax.Array]:
    if dtype == jnp.float32:
        return mean, jnp.zeros(mean.shape, jnp.bool_)
    narrow = _buffers.narrowed(mean, dtype, saturate=saturate).astype(jnp.float32)
    return narrow, jnp.abs(mean) > jnp.float32(jnp.finfo(dtype).max)


def dense_mean(policy: str, total: jax.Array, workers: int) -> tuple[jax.Array, jax.Array]:
    """The mean of a dense sum over the workers, and how many entries were left out.

    A dense allreduce leaves no residual, so an entry whose sum is not finite is left out;
    with ``propagate`` it reaches the update.
    """
    mean = total / workers
    if policy == "propagate":
        return mean, jnp.zeros((), jnp.int32)
    finite = jnp.isfinite(total)
    return jnp.where(finite, mean, 0.0), jnp.sum(~finite, dtype=jnp.int32)


def _too_large(mean: jax.Array, runs: list[tuple[int, Any]]) -> jax.Array:
    """How many entries of a mean are too large for their leaves."""
    count, start = jnp.zeros((), jnp.int32), 0
    for stop, dtype in runs:
        if dtype != jnp.float32:
            large = jnp.abs(mean[start:stop]) > jnp.float32(jnp.finfo(dtype).max)
            count += jnp.sum(large, dtype=jnp.int32)
        start = stop
    return count


def withhold(
    policy: str, total: PaddedCOO | jax.Array, sent: PaddedCOO, undelivered: Undelivered
) -> tuple[PaddedCOO | jax.Array, Undelivered, jax.Array]:
    """Takes entries that are not finite out of a dense total, and returns them to the workers.

    The sum of finite entries may overflow. Each worker then keeps its own part of such an
    entry, whole, so that nothing is lost and the residuals stay finite. The sums of a
    sparse total are finite by the contract of :class:`SparseAllreduce`.

    Returns:
      The total, the undelivered entries of this worker, and ``i32[]``, how many were taken out.
    """
    none = jnp.zeros((), jnp.int32)
    if isinstance(total, PaddedCOO):
        if policy == "propagate":
            total = PaddedCOO(_with_one_nan(total.values), total.indices, total.size)
        return total, undelivered, none
    if policy == "propagate":
        return _with_one_nan(total), undelivered, none
    dense = total
    finite = jnp.isfinite(dense)

    def delivered(indices):
        # Computed again for the few entries: all of ``finite`` would be an array of n bytes.
        return jnp.isfinite(dense.at[indices].get(mode="fill", fill_value=0))

    slots = jnp.where(delivered(sent.indices), undelivered.slots, sent.values)
    others = undelivered.others
    if others.capacity:
        # The rounding error of a sum that is not delivered is already part of what workers keep.
        values = jnp.where(delivered(others.indices), others.values, jnp.zeros_like(others.values))
        others = PaddedCOO(values, others.indices, others.size)
    total = jnp.where(finite, dense, jnp.zeros_like(dense))
    undelivered = undelivered._replace(slots=slots, others=others)
    return total, undelivered, jnp.sum(~finite, dtype=jnp.int32)


def _with_one_nan(values: jax.Array) -> jax.Array:
    """The values with NaN in one form.

    A sum of two NaN has the sign of one of them, by the order of the operands, in which the workers
    may differ.
    """
    return jnp.where(jnp.isnan(values), jnp.full_like(values, jnp.nan), values)


def limit_at(limit: optax.ScalarOrSchedule | None, count: jax.Array) -> jax.Array | None:
    """The limit of the step after ``count`` steps, ``f32[]``."""
    if limit is None:
        return None
    return jnp.asarray(limit(count) if callable(limit) else limit, jnp.float32)


def nothing_exchanged(step: Accumulated, axis: AxisName) -> tuple[jax.Array, SparseAllreduceState]:
    """The result for a buffer without entries."""
    info = _sparse_state.per_worker(_sparse_state.no_info(), lambda x: _varying.to_varying(x, axis))
    return jnp.zeros((0,), jnp.float32), step.state._replace(residual=step.acc, info=info)


def with_dense_leaves(
    reduced: tuple[jax.Array, SparseAllreduceState],
    step: Accumulated,
    total: jax.Array | None,
    options: Options,
) -> Reduced:
    """``reduced`` with the mean of the dense leaves, and with its words.

    Args:
      reduced: the mean of all other leaves, and the state.
      step: the step, dense leaves included.
      total: ``f32[d]``, the sum of the dense leaves over the workers; None: compute it here.
      options: the axis, and the policy for numbers that are not finite.
    """
    (mean, state), part = reduced, step.dense_pending
    if part is None:
        return mean, jnp.zeros((0,), jnp.float32), state
    if total is None:
        total = transport.psum(part.increment[0], options.axis)
    workers = transport.axis_size(options.axis)
    dense, dropped = dense_mean(options.nonfinite, total, workers)
    if options.nonfinite != "propagate":
        dropped += _too_large(dense, _buffers.dtype_runs(step.layout, dense=True))
    words = jnp.float32(extend.words_of_all_reduce(total.shape[0], workers))
    info = state.info
    state = state._replace(
        dense_velocity=part.velocity,
        dropped=state.dropped + dropped,
        info=info._replace(words=info.words + words, useful=info.useful + words),
    )
    return mean, dense, state
