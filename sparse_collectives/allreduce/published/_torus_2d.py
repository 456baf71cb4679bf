"""2D-torus allreduce (2DTAR): dense, and mostly inside the nodes."""

import jax
import jax.numpy as jnp

from sparse_collectives import _compat, transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import _frame
from sparse_collectives.transport import _dispatch


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

    @_frame.sums_in_range(float64=True)
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
    names = _compat.axis_names(axis)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(
            f"axis must be a pair (outer, inner) of mesh axis names for torus_2d, got {axis!r}. "
            "Write for example axis=('node', 'device') on a mesh with these two axes, or use "
            "dense() for one axis."
        )
    transport.axis_size(axis)
    return names
