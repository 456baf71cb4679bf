"""Full sums at the indices that another allreduce delivers."""

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bits, _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, SparseAllreduce, State
from sparse_collectives.allreduce._parts import _frame, _sums


def full_sums(inner: SparseAllreduce) -> SparseAllreduce:
    r"""Full sums: ``inner`` chooses the indices, and then all workers add their values there.

    .. math:: total_I = \sum_j acc_{j, I}, \qquad residual_{j, I} = 0

    An allreduce of selections delivers at an index only the values of the workers that selected
    it, and the values of the others wait. With :func:`ok_topk` the indices are those with the
    largest sums, which :func:`partitioned_topk` cannot find.

    Cost: the cost of ``inner``, and a psum of one word for each slot of its total,
    ``2 k (P-1)/P`` words for k slots. :func:`ok_topk` and :func:`spardl` gather only indices
    in the end, since the values are added up again (``SparseAllreduce.choose``), unless
    a codec makes pairs shorter than indices. With exact pairs the words are ``5 k (P-1)/P``
    in all around :func:`spardl`. Around :func:`ok_topk` they are, with m = k / P,
    ``(5.15 + 6 / sqrt(m)) k (P-1)/P``, or ``(5 + 9 / sqrt(m)) k (P-1)/P`` from m = 400 on, and at
    most ``0.2 k (P-1)/P`` for the global threshold. This is less than ``6 k (P-1)/P`` from about
    m = 100 on, unless chance makes a region so large that its neighbors cannot balance it.

    Args:
      inner: an allreduce of selections. The totals of :func:`ok_topk`, :func:`spardl` and
        :func:`gtopk` have k slots. Others have up to P k, or n if that is less. A dense
        total has the indices of its nonzero entries.

    Returns:
      A :class:`SparseAllreduce` with ``full_sums`` and with the state of ``inner``.

    Raises:
      TypeError: ``inner`` is not a :class:`SparseAllreduce`.
      ValueError: ``inner`` has full sums itself.
      ValueError: ``inner`` scatters its vectors. Write ``hierarchical(inner_axis=...,
        outer=full_sums(...))`` instead.
    """
    if not isinstance(inner, SparseAllreduce):
        raise TypeError(
            f"inner must be a SparseAllreduce, got {type(inner).__name__}. Write for example "
            "full_sums(sparse_collectives.allreduce.ok_topk(density=0.01))."
        )
    if inner.full_sums:
        raise ValueError("inner has full sums already: use it as it is.")
    if inner.shard_axis:
        raise ValueError(
            f"inner deals out vectors over {inner.shard_axis!r}. Write "
            "hierarchical(inner_axis=..., outer=full_sums(...))."
        )

    def reduce(coo: PaddedCOO, state: State, *, axis: AxisName, acc: jax.Array | None = None):
        coo = _frame.check_selection(coo, acc)
        workers = transport.axis_size(axis)
        if workers == 1:
            return inner.reduce(coo, state, axis=axis)
        if inner.choose is None:
            total, _, state, info = inner.reduce(coo, state, axis=axis)
            indices = _indices_of(total, workers * coo.capacity)
        else:
            indices, state, info = inner.choose(coo, state, axis=axis)
        with jax.named_scope("full_sums"):
            total, undelivered = _sums.sum_at(indices, acc, coo, axis)
        words = jnp.float32(_sums.sum_words(indices.shape[0], workers, 32))
        info = info._replace(words=info.words + words, useful=info.useful + words)
        return total, undelivered, state, info

    return inner._replace(
        reduce=reduce,
        choose=None,
        full_sums=True,
        may_keep_partial_sums=False,
        spec=Spec.of("full_sums", inner=inner),
    )


def _indices_of(total: PaddedCOO | jax.Array, most: int) -> jax.Array:
    """The indices of a total; of a dense one, of its at most ``most`` nonzero entries."""
    if isinstance(total, PaddedCOO):
        return total.indices
    size = total.shape[0]
    words = _bits.mask_words(lambda start, stop: total[start:stop] != 0, size)
    return _compaction.set_positions(words, min(most, size), size)[0]
