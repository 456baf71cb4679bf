"""The dense allreduces, with which every sparse one is compared."""

import jax
import jax.numpy as jnp

from sparse_collectives import _axes, _validation, transport
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

    @_frame.sums_in_range(float64=True, derivative=True)
    def reduce(coo: PaddedCOO, state: tuple[()], *, axis: AxisName):
        total = transport.psum(coo.to_dense(), axis)
        return total, Undelivered.of(coo), state, _info(coo, total, axis)

    return SparseAllreduce(
        _frame.without_state, reduce, spec=Spec.of("dense"), may_keep_partial_sums=False
    )


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
      ValueError: fewer than one bucket.
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      DenseOvlp in section 5 of Li and Hoefler, `Near-Optimal Sparse Allreduce for
      Distributed Deep Learning <https://doi.org/10.1145/3503221.3508399>`_, PPoPP
      2022.
    """
    buckets = _validation.check_positive_int("buckets", buckets)

    @_frame.sums_in_range(float64=True, derivative=True)
    def reduce(coo: PaddedCOO, state: tuple[()], *, axis: AxisName):
        vector = coo.to_dense()
        length = -(-coo.size // buckets)
        starts = range(0, coo.size, length)
        with jax.named_scope("dense_bucketed"):
            sums = [transport.psum(vector[i : i + length], axis) for i in reversed(starts)]
        total = sums[0] if len(sums) == 1 else jnp.concatenate(sums[::-1])
        return total, Undelivered.of(coo), state, _info(coo, total, axis)

    return SparseAllreduce(
        _frame.without_state,
        reduce,
        spec=Spec.of("dense_bucketed", buckets=buckets),
        may_keep_partial_sums=False,
    )


def _info(coo: PaddedCOO, total: jax.Array, axis: AxisName) -> ReduceInfo:
    words = coo.size * coo.values.dtype.itemsize / 4
    return ReduceInfo.of(total, _dispatch.words_of_all_reduce(words, transport.axis_size(axis)))


def torus_2d() -> SparseAllreduce:
    """Sums the selections of all workers as dense vectors, along two mesh axes.

    The sum is a reduce-scatter along the inner axis, an allreduce of the parts along the
    outer one, and an allgather along the inner one. For m nodes of w workers each, the links
    between the nodes carry 1/w of the words of a flat ring.

    Everything that was selected is delivered. Cost, with n padded to a multiple of
    w: ``2 n (w-1)/w`` words received inside the node and ``2 n/w (m-1)/m`` from
    outside; together ``2 n (P-1)/P`` with P = m w, as :func:`dense`, and ``2 log2(w)``
    latencies inside, ``2 log2(m)`` outside. ``sparse_collectives.traffic`` shows the two
    parts by scope: ``torus_2d/inner`` and ``torus_2d/outer``.

    Returns:
      A :class:`SparseAllreduce` without state; its total is ``f[n]``. Its ``axis`` is a pair
      ``(outer, inner)`` of mesh axis names; the workers of one node are those along ``inner``.

    Raises:
      ValueError: at ``reduce``, an axis that is not a pair of names, or not bound.

    References:
      Mikami et al., `Massively Distributed SGD: ImageNet/ResNet-50 Training in a
      Flash <https://arxiv.org/abs/1811.05233>`_, 2018; section 5.3 of Shi et al.,
      `Towards Scalable Distributed Training of Deep Learning on Public Cloud
      Clusters <https://arxiv.org/abs/2010.10458>`_, MLSys 2021.
    """

    def reduce(coo: PaddedCOO, state: tuple[()], *, axis: AxisName):
        _pair(axis)  # Before anything else asks for its size.
        return add(coo, state, axis=axis)

    @_frame.sums_in_range(float64=True, derivative=True)
    def add(coo: PaddedCOO, state: tuple[()], *, axis: AxisName):
        outer, inner = _pair(axis)
        inside, outside = transport.axis_size(inner), transport.axis_size(outer)
        part = -(-coo.size // inside)
        vector = jnp.pad(coo.to_dense(), (0, part * inside - coo.size))
        with jax.named_scope("torus_2d/inner"):
            mine = transport.psum_scatter(vector, inner) if inside > 1 else vector
        with jax.named_scope("torus_2d/outer"):
            mine = transport.psum(mine, outer)
        with jax.named_scope("torus_2d/inner"):
            total = transport.all_gather(mine, inner).reshape(-1)[: coo.size]
        word = coo.values.dtype.itemsize / 4
        words = (
            _dispatch.words_of_reduce_scatter(part * inside * word, inside)
            + _dispatch.words_of_all_reduce(part * word, outside)
            + _dispatch.words_of_all_gather(part * word, inside)
        )
        return total, Undelivered.of(coo), state, ReduceInfo.of(total, words)

    return SparseAllreduce(
        _frame.without_state, reduce, spec=Spec.of("torus_2d"), may_keep_partial_sums=False
    )


def _pair(axis: AxisName):
    names = _axes.axis_names(axis)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(
            f"axis must be a pair (outer, inner) of mesh axis names for torus_2d, got {axis!r}. "
            "Write for example axis=('node', 'device') on a mesh with these two axes, or use "
            "dense() for one axis."
        )
    transport.axis_size(axis)
    return names
