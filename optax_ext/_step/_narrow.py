"""A mean as leaves of several dtypes can hold it."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._step import _layout


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
