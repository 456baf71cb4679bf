"""Bucketed top-k: the largest magnitudes of each run of consecutive entries.

SparCML selects k of each 512 consecutive entries. An entry competes only with
the other entries of its bucket, and the selection is spread evenly, so that the
regions of an allreduce need no balancing.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import _validation
from sparse_collectives._data import Layout, as_layout
from sparse_collectives._sparse_ops import _bits, _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import SelectInfo, Selector
from sparse_collectives.select import _rows


def bucketed(density: float, *, bucket: int = 512) -> Selector:
    """Selects the ``max(1, round(density * bucket))`` largest entries of each bucket.

    Among entries tied at a bucket's k-th magnitude, those with the smallest indices are taken.
    Zeros are never selected. NaN counts as larger than infinity. The entries after the last whole
    bucket form a shorter bucket, from which the same share is taken. If ``bucket`` exceeds n, there
    is one bucket of n entries.

    Args:
      density: the share taken from each bucket, in (0, 1]. Below 1 / bucket, one
        entry of each bucket is taken.
      bucket: B, the number of consecutive entries that compete. The paper takes
        512; a multiple of 32 is fastest.

    Returns:
      A :class:`Selector` whose buffers have one slot for each entry that the
      buckets may take, about ``density * n``, and whose state is ``()``.
      ``info.threshold`` is the smallest of the buckets' k-th magnitudes.

    Raises:
      ValueError: density is not in (0, 1], or bucket is not a positive integer.

    Cost: two passes over n entries (group maxima and candidates), 16 over n / 16
    maxima and 31 over about ``2 density n`` slots, O(k log n). 33 more over n in
    the rare miss, and if more than 1/8 of the entries is selected.

    References:
      Renggli et al., SparCML: High-Performance Sparse Communication for Machine
      Learning, SC 2019, section 8.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> selector = bucketed(density=1 / 32, bucket=32)
      >>> acc = jnp.zeros(70).at[jnp.array([3, 7, 40])].set(jnp.array([1.0, -2.0, 0.5]))
      >>> coo, _, info = jax.jit(selector.select)(acc, selector.init(70))
      >>> coo.indices.tolist(), coo.values.tolist()
      ([7, 40, 70], [-2.0, 0.5, 0.0])
    """
    density = _validation.check_density(density)
    bucket = _validation.check_positive_int("bucket", bucket)

    def init(size: int | Layout) -> tuple[()]:
        as_layout(size)
        return ()

    def select(acc: jax.Array, state: tuple[()]):
        acc = _validation.as_vector("acc", acc)
        size = acc.shape[0]
        main = size // bucket * bucket
        chosen, thresholds, capacity = [], [], 0
        for begin, end, width in ((0, main, bucket), (main, size, size - main)):
            if begin < end:
                k = _validation.count_from_density(density, width)
                rows = acc[begin:end].reshape(-1, width)
                places, threshold = _rows.largest_of_rows(rows, k, axis=1)
                chosen.append(jnp.where(places < rows.size, begin + places, size))
                thresholds.append(threshold)
                capacity += k * rows.shape[0]
        coo, count = _compaction.compact_indices(acc, jnp.concatenate(chosen), capacity=capacity)
        info = SelectInfo(
            count,
            jnp.zeros_like(count),
            _bits.magnitude_from_bits(jnp.min(jnp.concatenate(thresholds))),
        )
        return coo, state, info

    return Selector(init, select, spec=Spec.of("bucketed", density=density, bucket=bucket))
