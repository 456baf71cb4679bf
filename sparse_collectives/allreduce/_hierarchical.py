"""HiTopKComm: dense inside the nodes, sparse between them."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _axes, _validation, transport
from sparse_collectives._data import Layout, PaddedCOO, as_layout
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, ReduceInfo, SparseAllreduce, State
from sparse_collectives.transport import _dispatch

# Words for delivered, threshold and words, which the workers of a node exchange.
_INFO_WORDS = 3


def hierarchical(*, inner_axis: AxisName, outer: SparseAllreduce) -> SparseAllreduce:
    r"""A reduce-scatter inside nodes, a sparse allreduce between them, and an allgather.

    For m nodes of w workers each and a density rho (Algorithm 2 of the paper, with any
    selector and any allreduce):

    1. the gradients are reduce-scattered inside the node: each worker has the sum of a
       shard of n / w components;
    2. it selects rho n / w of them;
    3. the workers at the same place in their nodes sum up their selections with
       ``outer``: w independent exchanges among m workers each;
    4. the totals are allgathered inside the node.

    Cost: inside the node ``2 n (w-1)/w`` words received, and ``3 (w-1)`` more for the info. Between
    nodes the words of ``outer`` for m workers and a shard: with :func:`topk_a` ``2 rho n (m-1)/w``,
    compared with ``2 rho n (m w - 1)`` of the flat algorithm. ``sparse_collectives.traffic`` shows
    the two parts by scope: ``hierarchical/inner`` and ``hierarchical/outer``.

    Deviations: the last step of the paper is also an allgather of dense shards, but its cost
    model (10) counts only rho n m / w nonzeros of each. Here it is dense, which takes fewer
    words than a sparse one if 2 rho m > 1, and is the same program at every step.

    The exchanges of the shards are independent, and so may decide differently. An
    ``outer`` with a ``ppermute`` in a branch of a conditional has to choose the branch
    with :func:`sparse_collectives.transport.holds_on_mesh`, or the program hangs.

    Args:
      inner_axis: the mesh axis of the workers of one node; it can't be the only axis.
      outer: any allreduce over the remaining axes.

    Returns:
      A :class:`SparseAllreduce` whose ``shard_axis`` is ``inner_axis``. Its vectors are scattered
      before the selection, ``scatter(f[n]) -> f[ceil(n / w)]`` (the last shard ends in zeros if w
      does not divide n), and the total is gathered at the end,
      ``gather(f[ceil(n / w)], n) -> f[n]``. The ``axis`` of ``reduce`` names all workers,
      ``inner_axis`` among them; the sum is over the other axes, and ``total`` is the same on all
      nodes. ``info`` is the same on all workers, except for ``overflow`` and ``useful``. It has the
      nonzero entries of all shards, the smallest threshold, and as words the mean of ``outer`` over
      the shards, plus the words inside the node, with ``scatter`` and ``gather``.

    Raises:
      TypeError: ``outer`` is not a :class:`SparseAllreduce`.
      ValueError: ``outer`` is hierarchical itself, or selects by row.
      ValueError: when traced, an axis that is not bound.
      ValueError: ``axis`` without ``inner_axis``, or without any other name.

    References:
      Shi et al., `Towards Scalable Distributed Training of Deep Learning on Public
      Cloud Clusters <https://arxiv.org/abs/2010.10458>`_, MLSys 2021, section 3.2.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> h = hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())
      >>> selector = sc.select.topk(density=0.5)
      >>> def step(gradient):
      ...     shard = h.scatter(gradient)
      ...     coo, _, _ = selector.select(shard, selector.init(2))
      ...     total, *_ = h.reduce(coo, h.init(4, 4), axis=("node", "device"))
      ...     return h.gather(total, 4)
      >>> gradients = jnp.arange(16.0).reshape(2, 2, 4)
      >>> run = sc.simulate(step, axis=("node", "device"), axis_size=(2, 2))
      >>> run(gradients)[0, 0].tolist()
      [0.0, 28.0, 0.0, 36.0]
    """
    if not isinstance(outer, SparseAllreduce):
        raise TypeError(
            f"outer must be a SparseAllreduce, got {type(outer).__name__}. Write for example "
            "outer=sparse_collectives.allreduce.topk_a()."
        )

    if outer.shard_axis:
        raise ValueError(
            f"outer deals out vectors over {outer.shard_axis!r} already: hierarchical is for two "
            "levels. Give both inner axes as one inner_axis, a tuple."
        )

    # Also if it is inside of another one, as in full_sums(row_topk(...)).
    if "row_axis=" in str(outer.spec):
        raise ValueError(
            "outer selects from the rows of layers, and a shard of a node cuts through rows, got "
            f"{outer.spec}. Use it over all workers without hierarchical, or give an outer without "
            "rows, such as ok_topk."
        )

    def init(layout: int | Layout, axis_size: int) -> State:
        size = as_layout(layout).size
        inner_size = transport.axis_size(inner_axis)
        if _validation.check_positive_int("axis_size", axis_size) % inner_size:
            raise ValueError(
                f"axis_size={axis_size} is not a multiple of the {inner_size} workers of "
                f"inner_axis={inner_axis!r}: every node has as many. Give the number of all "
                "workers as axis_size."
            )
        # A shard cuts through layers, so it is one layer.
        return outer.init(math.ceil(size / inner_size), axis_size // inner_size)

    def scatter(vector: jax.Array) -> jax.Array:
        inside = transport.axis_size(inner_axis)
        if inside == 1:
            return vector
        size = vector.shape[0]
        padded = jnp.pad(vector, (0, inside * math.ceil(size / inside) - size))
        with jax.named_scope("hierarchical/inner"):
            return transport.psum_scatter(padded, inner_axis)

    def local_view(acc: jax.Array, state: State, *, axis: AxisName) -> jax.Array:
        return outer.local_view(acc, state, axis=_axes.outer_axis(axis, inner_axis))

    def to_global(coo: PaddedCOO, size: int, state: State, *, axis: AxisName) -> PaddedCOO:
        return outer.to_global(coo, size, state, axis=_axes.outer_axis(axis, inner_axis))

    def reduce(coo: PaddedCOO, state: State, *, axis: AxisName, **held: jax.Array):
        nodes = _axes.outer_axis(axis, inner_axis)
        inside = transport.axis_size(inner_axis)
        with jax.named_scope("hierarchical/outer"):
            total, undelivered, state, info = outer.reduce(coo, state, axis=nodes, **held)
        # Zeros after the end of the vector are entries of a shard, and not of the vector.
        values = total.values if isinstance(total, PaddedCOO) else total
        info = info._replace(delivered=jnp.sum(values != 0, dtype=jnp.int32))
        with jax.named_scope("hierarchical/inner"):
            info = _of_all_shards(info, inner_axis)
        word = coo.values.dtype.itemsize / 4
        words = (
            _dispatch.words_of_reduce_scatter(coo.size * inside * word, inside)
            + _dispatch.words_of_all_gather(coo.size * word, inside)
            + _dispatch.words_of_all_gather(_INFO_WORDS, inside)
        )
        info = info._replace(
            words=info.words + jnp.float32(words), useful=info.useful + jnp.float32(words)
        )
        return total, undelivered, state, info

    def gather(total: jax.Array, size: int) -> jax.Array:
        # Also for one worker, because it types the result as the same on every worker.
        with jax.named_scope("hierarchical/inner"):
            return transport.all_gather(total, inner_axis).reshape(-1)[:size]

    return SparseAllreduce(
        init,
        reduce,
        spec=Spec.of("hierarchical", outer=outer),
        shard_axis=_axes.axis_names(inner_axis),
        scatter=scatter,
        gather=gather,
        full_sums=outer.full_sums,
        local_view=local_view,
        to_global=to_global,
        may_keep_partial_sums=outer.may_keep_partial_sums,
    )


def _of_all_shards(info: ReduceInfo, inner_axis: AxisName) -> ReduceInfo:
    """The info of all shards, the same on every worker of a node."""
    floats = lax.bitcast_convert_type(jnp.stack([info.threshold, info.words]), jnp.int32)
    gathered = transport.all_gather(
        jnp.concatenate([info.delivered.astype(jnp.int32)[None], floats]), inner_axis
    )
    threshold, words = lax.bitcast_convert_type(gathered[:, 1:], jnp.float32).T
    return info._replace(
        delivered=jnp.sum(gathered[:, 0], dtype=jnp.int32),
        threshold=jnp.min(threshold),
        words=jnp.mean(words),
    )
