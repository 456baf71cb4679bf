"""The dense allreduce, with which every sparse one is compared."""

from sparse_collectives import transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import _frame
from sparse_collectives.transport import _dispatch


def dense() -> SparseAllreduce:
    """Sums the selections of all workers as dense vectors of n components.

    Everything that was selected is delivered. Cost: ``2 n (P-1)/P`` words
    received and ``2 log2(P)`` latencies (Rabenseifner), whatever the density.

    Returns:
      A :class:`SparseAllreduce` without state; its total is ``f[n]``.
    """

    @_frame.sums_in_range(float64=True)
    def reduce(coo: PaddedCOO, state: tuple[()], *, axis: AxisName):
        workers = transport.axis_size(axis)
        total = transport.psum(coo.to_dense(), axis)
        words = coo.size * coo.values.dtype.itemsize / 4
        words = _dispatch.words_of_all_reduce(words, workers)
        return total, Undelivered.of(coo), state, ReduceInfo.of(total, words)

    return SparseAllreduce(
        _frame.without_state, reduce, spec=Spec.of("dense"), may_keep_partial_sums=False
    )
