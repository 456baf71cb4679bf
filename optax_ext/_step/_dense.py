"""The dense mean of gradients over the workers: the baseline."""

import dataclasses
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._step import _checks, _gradient_checks, _groups
from sparse_collectives import AxisName, _compat, _validation, extend, transport


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """State of :func:`dense`, the same on every worker.

    Attributes:
      count: ``i32[]``, steps taken.
      delivered: ``i32[]``, entries in the last update.
      words: ``f32[]``, 4-byte words that each worker received for it.
      axis: static, the mesh axis of the workers; a ``Ranks`` for an MPI communicator.
    """

    count: jax.Array
    delivered: jax.Array
    words: jax.Array
    axis: Hashable = dataclasses.field(metadata={"static": True})


def dense(*, axis: AxisName, buckets: int | None = None) -> optax.GradientTransformationExtraArgs:
    """Averages local gradients over the workers with a dense allreduce.

    What :func:`sparse_allreduce` replaces, with the same place in a chain and the
    same checks, so that a loop can switch between the two in one word.
    Cost: ``2 n (P-1)/P`` words received, and ``2 log2(P)`` latencies for each
    allreduce: one for each leaf, or for each bucket.

    With ``buckets`` this is the baseline DenseOvlp of the Ok-Topk paper: leaves are
    joined to buckets, and the allreduce of a bucket needs only the leaves in it, so
    that XLA can exchange the last layers while the backward pass still computes
    the first. Few large messages cost less than many small ones; each bucket of more
    than one leaf costs two copies of it. XLA merges allreduces that do not depend on
    one another, on CPU within one process all of them (over Gloo they were seen to stay
    apart), on GPU up to ``--xla_gpu_all_reduce_combine_threshold_bytes`` (30 MB by
    default): buckets smaller than that become one again.

    Args:
      axis: the mesh axis, or a tuple of them.
      buckets: about how many buckets of equal size, made of whole leaves, the last
        leaves of the tree first; leaves of different dtypes are not joined. None:
        one allreduce for each leaf.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`DenseState`;
      :func:`optax_ext.get_info` reads its words and counts. Its ``init`` may be called
      anywhere.

    Raises:
      ValueError: fewer than one bucket; an axis that is not bound; gradients already
        summed over it.
    """
    if buckets is not None:
        buckets = _validation.check_positive_int("buckets", buckets)

    def init(params: Any) -> DenseState:
        del params
        zero = jnp.zeros((), jnp.int32)
        return DenseState(zero, jnp.zeros_like(zero), jnp.float32(0), _compat.static_axis(axis))

    def update(updates: Any, state: DenseState, params: Any = None):
        del params
        _checks.check_state_axis(state.axis, _compat.static_axis(axis))
        workers = _checks.workers(axis)
        for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
            _validation.check_float(f"updates{jax.tree_util.keystr(path)}", leaf.dtype)
        _gradient_checks.check_local_gradients(updates, axis)
        leaves, treedef = jax.tree.flatten(updates)
        means: list[Any] = [None] * len(leaves)
        for bucket in _bucketed(leaves, buckets):
            for i, mean in zip(bucket, _mean([leaves[i] for i in bucket], axis), strict=True):
                means[i] = mean
        words = sum(leaf.size * leaf.dtype.itemsize / 4 for leaf in leaves)
        state = DenseState(
            count=state.count + 1,
            delivered=jnp.int32(sum(leaf.size for leaf in leaves)),
            words=jnp.float32(extend.words_of_all_reduce(words, workers)),
            axis=state.axis,
        )
        return jax.tree.unflatten(treedef, means), state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)


def _bucketed(leaves: list[jax.Array], buckets: int | None) -> list[list[int]]:
    """The numbers of the leaves in each bucket, the last leaves first."""
    if buckets is None:
        return [[i] for i in reversed(range(len(leaves)))]
    return _groups.grouped(
        [x.size * x.dtype.itemsize for x in leaves], buckets, [x.dtype for x in leaves]
    )


def _mean(leaves: list[jax.Array], axis: AxisName) -> list[jax.Array]:
    """The mean of each leaf over the workers, in one allreduce."""
    if len(leaves) == 1:
        return [transport.pmean(leaves[0], axis)]
    mean = transport.pmean(jnp.concatenate([jnp.ravel(leaf) for leaf in leaves]), axis)
    means, offset = [], 0
    for leaf in leaves:
        means.append(mean[offset : offset + leaf.size].reshape(leaf.shape))
        offset += leaf.size
    return means
