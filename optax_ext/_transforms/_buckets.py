"""Several buffers instead of one, so that their exchanges overlap the backward pass."""

from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext._error_feedback import _groups, _roles
from optax_ext._error_feedback._roles import SHARED
from sparse_collectives import _validation


@_roles.declared
class BucketedState(NamedTuple):
    """State of :func:`bucketed`.

    Attributes:
      buckets: the state of each bucket, beginning with the bucket of the last leaves.
    """

    buckets: Annotated[tuple[Any, ...], SHARED]


def bucketed(
    tx: optax.GradientTransformation, buckets: int
) -> optax.GradientTransformationExtraArgs:
    """Applies ``tx`` to the gradients in several buckets, the last layers first.

    One buffer of all gradients is complete only after the backward pass. A bucket of the last
    layers is complete long before, and XLA can exchange it while the rest is computed
    (on GPU with its latency-hiding scheduler). The buckets are exchanged in sequence: each
    begins when the previous one has ended. They would share the network anyway, and the order
    keeps XLA from joining their small messages into one that waits for all of them.

    Each bucket has its own state: thresholds, regions, counts. The density therefore applies
    to each bucket. In a loop that holds skipped steps, as :func:`make_train_step` does, all buckets
    skip a step together. More buckets mean more messages. Make buckets large enough that bandwidth
    rather than latency dominates, which on most networks takes some millions of entries.

    Args:
      tx: :func:`sparse_allreduce`, one of its aliases, or :func:`dense`; it is used for
        each bucket. Transformations of all parameters together, such as
        ``optax.clip_by_global_norm``, belong after ``bucketed``, not inside it.
      buckets: the approximate number of buckets, of about equal size and made of whole leaves.
        A leaf larger than its share is a bucket.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. :func:`get_info` adds up the counts of its
      buckets.

    Raises:
      ValueError: fewer than one bucket.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax.chain(
      ...     bucketed(optax_ext.ok_topk(density=0.01, axis="data"), 4), optax.adam(1e-3)
      ... )
    """
    buckets = _validation.check_positive_int("buckets", buckets)
    inner_tx = optax.with_extra_args_support(tx)

    def parts(tree: Any) -> list[Any]:
        sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
        # Without leaves one empty bucket, so that multi_steps finds an exchange in it.
        groups = _groups.grouped(sizes, buckets, [None] * len(sizes)) or [[]]
        return _groups.parts(tree, groups)

    def init(params: Any) -> BucketedState:
        return BucketedState(tuple(tx.init(part) for part in parts(params)))

    def update(updates: Any, state: BucketedState, params: Any = None, **extra_args: Any):
        given = None if params is None else parts(params)
        states, reduced = [], []
        for i, part in enumerate(parts(updates)):
            if reduced:
                part = _after(reduced[-1], part)
            mine = None if given is None else given[i]
            result, new = inner_tx.update(part, state.buckets[i], mine, **extra_args)
            states.append(new)
            reduced.append(result)
        return _groups.joined(updates, reduced), BucketedState(tuple(states))

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _after(done: Any, tree: Any) -> Any:
    """``tree``, unchanged, but dependent on ``done``.

    XLA drops ``lax.optimization_barrier`` before it joins collectives. Instead a zero computed
    from ``done`` is added, in a pass that copies the leaves anyway.
    """
    some = [leaf for leaf in jax.tree.leaves(done) if leaf.size]
    if not some:
        return tree
    first = some[0].ravel()[0].astype(jnp.float32)
    zero = ((lax.bitcast_convert_type(first, jnp.int32) & 1) >> 1).astype(jnp.float32)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), tree)
