"""The dense allreduce in buckets, which can overlap with the computation of them (DenseOvlp)."""

import jax
import jax.numpy as jnp

from sparse_collectives import _validation, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import _frame
from sparse_collectives.transport import _dispatch


def dense_bucketed(*, buckets: int) -> SparseAllreduce:
    """Sums the selections of all workers as dense vectors, one bucket after the other.

    The buckets are slices of the flat buffer, the last one first, because a backward pass
    computes the gradients of the last layers first. Each bucket is an independent
    allreduce, so that XLA may exchange one while it works on the next. Whether it does
    depends on the preceding computation: a flat buffer of all leaves exists only when the
    backward pass is over. To overlap with the backward pass, use
    ``optax_ext.dense(axis=..., buckets=...)``, whose buckets are made of whole leaves.

    XLA may merge allreduces again: on CPU it merges all that it can, on GPU up to
    ``--xla_gpu_all_reduce_combine_threshold_bytes`` (30 MB by default), so buckets
    should not be smaller than that.

    Everything that was selected is delivered. Cost: ``2 n (P-1)/P`` words received
    and ``2 log2(P)`` latencies for each bucket; one more pass over n, which joins the
    buckets and which XLA fuses with the next use of the total.

    Args:
      buckets: the number of buckets; the last may be shorter than the others.

    Returns:
      A :class:`SparseAllreduce` without state; its total is ``f[n]``, with the same bits
      as the total of :func:`dense` if the backend adds in the same order.

    Raises:
      ValueError: fewer than one bucket; at ``reduce``, an axis that is not bound.

    References:
      DenseOvlp in section 5 of Li and Hoefler, `Near-Optimal Sparse Allreduce for
      Distributed Deep Learning <https://doi.org/10.1145/3503221.3508399>`_, PPoPP
      2022.
    """
    buckets = _validation.check_positive_int("buckets", buckets)

    @_frame.sums_in_range(float64=True)
    def reduce(coo: PaddedCOO, state: tuple[()], *, axis: AxisName):
        workers = transport.axis_size(axis)
        vector = coo.to_dense()
        length = -(-coo.size // buckets)
        starts = range(0, coo.size, length)
        with jax.named_scope("dense_bucketed"):
            sums = [transport.psum(vector[i : i + length], axis) for i in reversed(starts)]
        total = sums[0] if len(sums) == 1 else jnp.concatenate(sums[::-1])
        words = coo.size * coo.values.dtype.itemsize / 4
        words = _dispatch.words_of_all_reduce(words, workers)
        return total, Undelivered.of(coo), state, ReduceInfo.of(total, words)

    return SparseAllreduce(
        _frame.without_state,
        reduce,
        spec=Spec.of("dense_bucketed", buckets=buckets),
        may_keep_partial_sums=False,
    )
