"""An allreduce to start from: all workers gather all selections, and keep the k largest sums.

Copy the file, rename ``my_allreduce``, and replace the numbered parts. Every allreduce has the
other parts. The file passes the checks as it stands:

    make contract ALLREDUCE=docs/templates/my_allreduce.py:my_allreduce
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

import sparse_collectives as sc
from sparse_collectives import extend, transport, wire


class MyAllreduceState(NamedTuple):
    """Everything that changes from step to step, with the same values on every worker.

    Attributes:
      count: ``i32[]``, steps taken.
    """

    count: jax.Array


def my_allreduce(*, density: float) -> sc.SparseAllreduce:
    """Delivers the ``k = max(1, round(density * n))`` largest sums of all selections.

    Cost, for selections of c slots: ``2 c (P-1)`` words received, in one allgather. Compute: P c
    additions into n zeros, and a search for the k-th magnitude among P c sums.

    Args:
      density: k / n of the total, in (0, 1].

    Returns:
      A :class:`sparse_collectives.SparseAllreduce`; its total is a PaddedCOO of k slots.

    Raises:
      ValueError: density is not in (0, 1], or ``reduce`` gets an axis that is not bound.
    """
    density = extend.check_density(density)
    codec = wire.raw()  # It is exact. A lossy one reports errors, which a worker has to keep.

    def init(layout: int | sc.Layout, axis_size: int) -> MyAllreduceState:
        del layout, axis_size
        return MyAllreduceState(count=jnp.zeros((), jnp.int32))

    def reduce(coo: sc.PaddedCOO, state: MyAllreduceState, *, axis: sc.AxisName):
        size, workers = coo.size, transport.axis_size(axis)
        k = min(size, max(1, round(density * size)))

        # 1. Sums stay finite: a worker sends at most its share of the range, and keeps the rest.
        share = 2.0 ** (
            math.floor(math.log2(float(jnp.finfo(coo.values.dtype).max)))
            - math.ceil(math.log2(workers))
        )
        bounded = jnp.clip(coo.values, -share, share)
        values = jnp.where(jnp.isfinite(coo.values), bounded, coo.values)

        # 2. The exchange is one integer array, so that it is one collective.
        message = codec.encode(sc.PaddedCOO(values, coo.indices, size), jnp.uint32(0)).message
        gathered = transport.all_gather(message, axis)
        everyone = codec.decode(gathered, size, coo.values.dtype)

        # 3. Every worker makes the total from the same numbers in the same order. It adds row by
        # row, since indices are unique only within a row, and a GPU has no fixed order of
        # additions to one place.
        def add(sums, row):
            indices, values = row
            return sums.at[indices].add(values.astype(jnp.float32), mode="drop"), None

        zeros = jnp.full((size,), jnp.zeros_like(everyone.values[0, 0], jnp.float32))
        sums, _ = jax.lax.scan(add, zeros, (everyone.indices, everyone.values))
        sums = sums.astype(coo.values.dtype)
        chosen, pattern = extend.largest_mask(extend.magnitude_bits(sums), k)
        (indices,) = jnp.nonzero(chosen, size=k, fill_value=size)
        indices = indices.astype(jnp.int32)
        total = sc.PaddedCOO(sums.at[indices].get(mode="fill", fill_value=0), indices, size)

        # 4. This worker keeps the entries of its slots whose index is not in the total, and the
        # rest beyond its share of the others.
        arrived = chosen.at[coo.indices].get(mode="fill", fill_value=False)
        kept = jnp.where(arrived, coo.values - values, coo.values)
        kept = jnp.where(arrived & ~jnp.isfinite(coo.values), 0, kept)
        undelivered = sc.Undelivered.of(coo, kept)

        # 5. The info of the step. `words` counts received words with padding, `useful` counts sent
        # words without it.
        words = extend.words_of_all_gather(message.size, workers)
        entries = jnp.sum(coo.indices < size, dtype=jnp.int32)
        useful = jnp.float32(words) * entries.astype(jnp.float32) / coo.capacity
        threshold = jax.lax.bitcast_convert_type(pattern, jnp.float32)
        info = sc.ReduceInfo.of(total, words, useful=useful, threshold=threshold)
        return total, undelivered, MyAllreduceState(state.count + 1), info

    # A worker keeps no entries that others sent, so its ``others`` are empty.
    spec = sc.Spec.of("my_allreduce", density=density)
    return sc.SparseAllreduce(init, reduce, spec=spec, may_keep_partial_sums=False)
