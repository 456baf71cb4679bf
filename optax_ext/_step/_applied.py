"""What of a total is applied: a mean within the limit, as the dtypes of the leaves can hold it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._step import _layout
from sparse_collectives import AxisName, PaddedCOO, transport


def mean_of(
    total: PaddedCOO | jax.Array,
    layout: _layout.TreeLayout,
    *,
    axis: AxisName,
    shard_axis: AxisName,
    limit: jax.Array | None,
    saturates: bool,
) -> tuple[jax.Array, Any, jax.Array]:
    """The total over P, ``f32[m]``, and what of it is not applied.

    There may be a limit, and a 16-bit leaf rounds its update, and may be too narrow for it. What
    that takes off is the same on every worker; each keeps it once for every worker whose update
    it is, so that over the workers the sum of the residuals has all of it.

    Args:
      total: of all workers, or of a shard.
      layout: of the leaves.
      axis: of all workers.
      shard_axis: over which the buffer is dealt out; ``()`` for none.
      limit: ``f32[]``, beyond which three quarters of an entry are kept; None: there is none.
      saturates: whether what is finite stays so.

    Returns:
      The mean; what this worker keeps, as :attr:`Kept.rounding`; ``i32[]``, entries that
      are too large for their leaves.
    """
    workers, shards = transport.axis_size(axis), transport.axis_size(shard_axis)
    narrow = narrows(layout)
    saturated = jnp.zeros((), jnp.int32)
    whole = not narrow and limit is None

    def applied(mean, index):
        """What of the mean is applied, what is not, and how many saturate."""
        kept, count = _limited(mean, limit), saturated
        if narrow:
            kept, large = held(kept, index, layout, saturate=saturates)
            count = jnp.sum(large & saturates, dtype=jnp.int32)
        # What is not finite is in the update, by policy, and nothing of it can be kept.
        off = jnp.where(jnp.isfinite(kept), mean - kept, 0.0) * jnp.float32(shards)
        return kept, off, count

    def place(local, size):
        """Where an entry of this shard is in the whole buffer."""
        return local + transport.axis_index(shard_axis) * size if shard_axis else local

    if not isinstance(total, PaddedCOO):
        size = total.shape[0]
        mean = total.astype(jnp.float32) / workers
        if whole:
            return mean, (), saturated
        everywhere = jnp.arange(size, dtype=jnp.int32)
        return applied(mean, place(everywhere, size) if shard_axis else None)
    size = total.size
    values, rounding = total.values.astype(jnp.float32) / workers, ()
    if not whole:
        index = jnp.where(total.indices < size, place(total.indices, size), -1)
        values, off, saturated = applied(values, index)
        rounding = PaddedCOO(off, total.indices, size)
    return PaddedCOO(values, total.indices, size).to_dense(), rounding, saturated


def _limited(mean: jax.Array, limit: jax.Array | None) -> jax.Array:
    """``mean`` up to the limit, and a quarter of what is beyond it.

    A hard limit would let updates of one sign pile up without bound wherever more of them arrive
    between two deliveries of an entry than the limit lets through. With a quarter of what is
    beyond, no more waits after a delivery than three times the most that arrived between two.
    """
    if limit is None:
        return mean
    beyond = mean - jnp.clip(mean, -limit, limit)
    return jnp.where(jnp.isfinite(mean), mean - 0.75 * beyond, mean)


def narrows(layout: _layout.TreeLayout) -> bool:
    """Whether a leaf of the sparse buffer is narrower than float32."""
    return any(dtype != jnp.float32 for _, dtype in _layout.dtype_runs(layout))


def held(
    mean: jax.Array, index: jax.Array | None, layout: _layout.TreeLayout, *, saturate: bool
) -> tuple[jax.Array, jax.Array]:
    """What the leaves keep of ``mean``, and where it is larger than anything they can hold.

    The program for entries at an ``index`` has a few operations for each of the dtypes, and not
    for each of the leaves: their dtypes may take turns hundreds of times.

    Args:
      mean: ``f32[m]``.
      index: ``i32[m]``, the place of each entry in the sparse buffer, and negative where there is
        none; None: ``mean`` is the whole buffer, which is cut into the runs of one dtype.
      layout: of the leaves.
      saturate: whether what is finite stays so.

    Returns:
      ``f32[m]`` and ``bool[m]``.
    """
    runs = _layout.dtype_runs(layout)
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
    # A search without a loop: on a GPU one kernel.
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
    narrow = _layout.narrowed(mean, dtype, saturate=saturate).astype(jnp.float32)
    return narrow, jnp.abs(mean) > jnp.float32(jnp.finfo(dtype).max)
