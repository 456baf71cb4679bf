"""The dense mean of gradients over the workers: the baseline."""

from typing import Any, cast

import jax
import optax

from optax_ext import _checks
from sparse_collectives import _validation
from sparse_collectives._types import AxisName


def dense(*, axis: AxisName) -> optax.GradientTransformation:
    """Averages local gradients over the workers with a dense allreduce.

    What :func:`sparse_allreduce` replaces, with the same place in a chain and the
    same checks, so that a loop can switch between the two in one word.
    Cost: ``2 n (P-1)/P`` words received.

    Args:
      axis: the mesh axis, or a tuple of them.

    Returns:
      A stateless ``optax.GradientTransformation``.

    Raises:
      ValueError: an axis that is not bound; gradients already summed over it.
    """

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any = None):
        del params
        _checks.workers_at_update(axis, None)
        for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
            _validation.check_float(f"updates{jax.tree_util.keystr(path)}", leaf.dtype)
        _checks.check_local_gradients(updates, axis)
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, axis), updates), state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformation(cast(Any, init), cast(Any, update))
