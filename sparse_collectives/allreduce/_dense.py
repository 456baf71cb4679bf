"""The dense allreduce: the baseline that every sparse one is measured against."""

import jax.numpy as jnp

from sparse_collectives import _validation, _volumes, transport
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, ReduceInfo, SparseAllreduce
from sparse_collectives.allreduce._shared import _range, _undelivered
from sparse_collectives.padded_coo import PaddedCOO


def dense() -> SparseAllreduce:
    """Sums the selections of all workers as dense vectors of n components.

    Everything that was selected is delivered. Cost: ``2 n (P-1)/P`` words
    received and ``2 log2(P)`` latencies (Rabenseifner), whatever the density.

    Returns:
      A :class:`SparseAllreduce` without state; its total is ``f[n]``.
    """

    def init(size: int, axis_size: int) -> tuple[()]:
        _validation.check_size(size)
        _validation.check_positive_int("axis_size", axis_size)
        return ()

    @_range.sums_in_range(float64=True)
    def reduce(coo: PaddedCOO, state: tuple[()], *, axis: AxisName):
        workers = transport.axis_size(axis)
        total = transport.psum(coo.to_dense(), axis)
        words = coo.size * coo.values.dtype.itemsize / 4
        words = jnp.float32(_volumes.all_reduce(words, workers))
        info = ReduceInfo(
            delivered=jnp.sum(total != 0, dtype=jnp.int32),
            overflow=jnp.zeros((), jnp.int32),
            threshold=jnp.zeros((), jnp.float32),
            words=words,
            useful=words,
        )
        return total, _undelivered.nothing(coo), state, info

    return SparseAllreduce(init, reduce, spec=Spec.of("dense"), keeps_others=False)
