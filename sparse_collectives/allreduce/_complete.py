"""Complete sums at the indices that another allreduce delivers."""

import jax
import jax.numpy as jnp

from sparse_collectives import transport
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, SparseAllreduce, State
from sparse_collectives.allreduce._parts import _sum_at
from sparse_collectives.padded_coo import PaddedCOO


def complete(inner: SparseAllreduce) -> SparseAllreduce:
    r"""``inner`` chooses the indices, and then all workers add what they have there.

    .. math:: total_I = \sum_j acc_{j, I}, \qquad residual_{j, I} = 0

    An allreduce of selections applies to an entry what the few workers had that selected
    it, and what the others have waits. With :func:`ok_topk` the indices are those of the
    largest sums, which :func:`agreed` does not know.

    Cost: that of ``inner``, and a psum of one word for each slot of its total:
    ``2 k (P-1)/P`` words for k slots. Of :func:`ok_topk` and :func:`spardl` only the indices
    are gathered in the end, as the values are added up again (``SparseAllreduce.choose``),
    unless a codec makes pairs shorter than indices. With exact pairs that is ``5 k (P-1)/P``
    words in all around :func:`spardl`. Around :func:`ok_topk` it is, with m = k / P,
    ``(5.15 + 6 / sqrt(m)) k (P-1)/P`` and at most 0.2 of them for the global threshold: less
    than ``6 k (P-1)/P`` from about m = 100 on, unless chance makes a region so large that
    more than neighbours have to balance it.

    Args:
      inner: an allreduce whose total is a PaddedCOO: :func:`ok_topk`, :func:`spardl`,
        :func:`gtopk`, :func:`ring_sparse`, :func:`ssar_split_allgather`,
        :func:`ssar_recursive_double` or :func:`sparse_allgather`.

    Returns:
      A :class:`SparseAllreduce` that is ``complete``, with the state of ``inner``.

    Raises:
      TypeError: ``inner`` is not a :class:`SparseAllreduce`; at ``reduce``, a total that is
        dense.
      ValueError: ``inner`` is complete itself, or deals out its vectors: write
        ``hierarchical(inner_axis=..., outer=complete(...))``.
    """
    if not isinstance(inner, SparseAllreduce):
        raise TypeError(
            f"inner must be a SparseAllreduce, got {type(inner).__name__}. Write for example "
            "complete(sparse_collectives.allreduce.ok_topk(density=0.01))."
        )
    if inner.complete:
        raise ValueError("inner has complete sums already: use it as it is.")
    if inner.shard_axis:
        raise ValueError(
            f"inner deals out vectors over {inner.shard_axis!r}. Write "
            "hierarchical(inner_axis=..., outer=complete(...))."
        )

    def reduce(coo: PaddedCOO, state: State, *, axis: AxisName, acc: jax.Array | None = None):
        workers = transport.axis_size(axis)
        if workers == 1:
            total, undelivered, state, info = inner.reduce(coo, state, axis=axis)
            _sparse(total)
            return total, undelivered, state, info
        if inner.choose is None:
            total, _, state, info = inner.reduce(coo, state, axis=axis)
            indices = _sparse(total).indices
        else:
            indices, state, info = inner.choose(coo, state, axis=axis)
        with jax.named_scope("complete"):
            result = _sum_at.sum_at(indices, acc, coo, axis)
        words = jnp.float32(_sum_at.sum_words(indices.shape[0], workers, 32))
        info = info._replace(words=info.words + words, useful=info.useful + words)
        return result.total, result.undelivered, state, info

    return SparseAllreduce(inner.init, reduce, spec=Spec.of("complete", inner=inner), complete=True)


def _sparse(total: PaddedCOO | jax.Array) -> PaddedCOO:
    if not isinstance(total, PaddedCOO):
        raise TypeError(
            "inner has a dense total, which does not say which indices were selected. Use an "
            "allreduce whose total is a PaddedCOO, such as ok_topk."
        )
    return total
