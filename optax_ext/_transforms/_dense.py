"""The dense mean of gradients over the workers: the baseline."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _groups, _layout, _nonfinite, _same_params, _trace_checks
from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._state import _flax
from sparse_collectives import AxisName, _axes, _validation, extend, transport

DTYPES = ("float16", "bfloat16", "float32")


def dense(
    *, axis: AxisName, buckets: int | None = None, dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Averages local gradients over the workers with a dense allreduce.

    This is the baseline that :func:`sparse_allreduce` replaces. It has the same position in a
    chain and the same checks, so that a loop can switch between the two by changing one word.
    Cost: ``2 n (P-1)/P`` words received, and ``2 log2(P)`` latencies for each
    allreduce. There is one allreduce for each leaf, or for each bucket.

    If some entry of the mean is not finite, because a gradient is not or because the sum overflows,
    the step is skipped: the mean is all zeros, and :attr:`DenseState.skipped` counts it. All
    workers have the same mean, so this takes one pass over it and no message. (Devices to which a
    mapped function gives parts of the parameters exchange one word inside of their worker.)

    With ``buckets`` this is the baseline DenseOvlp of the Ok-Topk paper: leaves are
    joined to buckets, and the allreduce of a bucket needs only the leaves in it, so
    that XLA can exchange the last layers while the backward pass still computes
    the first. Few large messages cost less than many small ones; each bucket of more
    than one leaf costs two copies of it. XLA merges allreduces that do not depend on
    each other: on CPU within one process all of them (over Gloo they stayed
    separate), on GPU up to ``--xla_gpu_all_reduce_combine_threshold_bytes`` (30 MB by
    default). Buckets smaller than that become one again.

    Args:
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      buckets: the approximate number of buckets, of about equal size and made of whole leaves,
        the last leaves of the tree first; leaves of different dtypes are not joined. None:
        one allreduce for each leaf.
      dtype: the dtype of messages. ``"float16"`` and ``"bfloat16"`` take half of the words of
        float32; the mean still has the dtypes of the gradients. Each worker divides its gradient
        by P before rounding, so that the sum does not overflow. In float16, entries below 6e-8 P
        become 0, and rounding errors are lost. On CPU bfloat16 gains nothing, since XLA widens it
        before the sum. None: the dtypes of the gradients; of float16 the same is true.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`DenseState`;
      :func:`optax_ext.get_info` reads its words and counts. Its ``init`` may be called
      anywhere.

    Raises:
      ValueError: fewer than one bucket.
      ValueError: another dtype.
      ValueError: the axis is not bound.
      ValueError: the gradients are already summed over it.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> tx = dense(axis="w", dtype="float16")
      >>> step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2)
      >>> step(jnp.array([[60000.0, 1.0], [50000.0, 2.0]]))[0].tolist()
      [54976.0, 1.5]
    """
    if buckets is not None:
        buckets = _validation.check_positive_int("buckets", buckets)
    if dtype is not None:
        _validation.check_choice("dtype", jnp.dtype(dtype).name, DTYPES)
        dtype = jnp.dtype(dtype)

    def init(params: Any) -> DenseState:
        _flax.register()
        static = _axes.static_axis(axis)  # Checks the axis first.
        _same_params.check(params, axis)
        # One array for each field, since two donated arguments cannot be the same array.
        count, skipped, delivered = (jnp.zeros((), jnp.int32) for _ in range(3))
        return DenseState(count, skipped, delivered, jnp.float32(0), static)

    def update(updates: Any, state: DenseState, params: Any = None):
        del params
        _trace_checks.check_state_axis(state.axis, _axes.static_axis(axis))
        workers = _trace_checks.workers(axis)
        _layout.check_floats(updates, "updates")
        updates = _trace_checks.own_gradients(updates, axis)
        given, treedef = jax.tree.flatten(updates)
        # A sum in float16 would overflow where the mean does not.
        shared = [dtype is not None or leaf.dtype == jnp.float16 for leaf in given]
        leaves = [
            _share(leaf, workers, dtype or leaf.dtype) if divided else leaf
            for leaf, divided in zip(given, shared, strict=True)
        ]
        means: list[Any] = [None] * len(leaves)
        for bucket in _bucketed(leaves, buckets):
            reduced = _reduced([leaves[i] for i in bucket], axis, of_shares=shared[bucket[0]])
            for i, mean in zip(bucket, reduced, strict=True):
                means[i] = mean.astype(given[i].dtype)
        words = sum(leaf.size * leaf.dtype.itemsize / 4 for leaf in leaves)
        finite = _nonfinite.all_finite(means, axis)
        taken = dataclasses.replace(
            state,
            count=state.count + 1,
            delivered=jnp.int32(sum(leaf.size for leaf in leaves)),
            words=jnp.float32(extend.words_of_all_reduce(words, workers)),
        )
        skipped = dataclasses.replace(state, skipped=state.skipped + 1)
        means, state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (means, taken),
            ([jnp.zeros_like(mean) for mean in means], skipped),
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


def _share(leaf: jax.Array, workers: int, dtype: Any) -> jax.Array:
    """The contribution of a worker to the mean."""
    return (leaf.astype(jnp.float32) / workers).astype(dtype)


def _reduced(leaves: list[jax.Array], axis: AxisName, *, of_shares: bool) -> list[jax.Array]:
    """The mean of each leaf over the workers, or the sum of its shares, in one allreduce."""
    reduce = transport.psum if of_shares else transport.pmean
    if len(leaves) == 1:
        return [reduce(leaves[0], axis)]
    mean = reduce(jnp.concatenate([jnp.ravel(leaf) for leaf in leaves]), axis)
    means, offset = [], 0
    for leaf in leaves:
        means.append(mean[offset : offset + leaf.size].reshape(leaf.shape))
        offset += leaf.size
    return means
