"""The parameters at the end of a training: the mean of what the workers look ahead to."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _residual
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _consolidate, _nnx, _placement, _shards, _wrappers
from optax_ext._state._residual_tree import residual_tree


@_placement.on_auto_axes
def flush(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Moves the parameters to the mean of the look-ahead parameters of all workers.

    Each worker has taken its last gradients at parameters of its own, which include a share of its
    residual (``step_ahead`` of :func:`residual`). This moves the parameters to the mean of these
    points, and takes the shares out of the residuals. Use it at the end of a training with
    :func:`sparse_adamw`, :func:`sparse_sgd`, or another optimizer whose residuals are updates of
    the parameters. It is a dense exchange of n numbers.

    In rounds (``every=``) the share is all of the residual, so that the result is the mean of the
    workers' models. With an exchange at every step the default is 1/P, or 0.1 with more than ten
    workers. The rest stays in the residuals, and
    ``optax_ext.metrics(opt_state)["residual_norm"]`` reports its size: the updates of hundreds of
    steps would go too far if they were applied at once. :func:`consolidate` returns all of it.

    Args:
      params: the parameters.
      opt_state: as for :func:`consolidate`.

    Returns:
      ``(params, opt_state)``. P times the change of the parameters, plus the sum of the remaining
      residuals over the workers, equals the sum of the residuals before.

    Raises:
      ValueError: the residuals are gradients (pass the result of :func:`consolidate` to the
        optimizer after the allreduce instead).
      ValueError: a transformation follows the optimizer in its chain, such as a mask that freezes
        leaves, which would be left out.
      ValueError: as :func:`consolidate`.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.sparse_adamw(0.5, axis="w")
      >>> state = optax_ext.init_state(tx, jnp.zeros(2), {"w": 2})
      >>> state = state._replace(residual=jnp.array([[1.0, 4.0], [0.0, 0.0]]))
      >>> params, state = flush(jnp.zeros(2), state)
      >>> params.tolist(), state.residual.tolist()
      ([0.25, 1.0], [[0.5, 2.0], [0.0, 0.0]])
    """
    given, opt_state = opt_state, _nnx.arrays(opt_state)
    _consolidate.check("flush(params, opt_state)", params, opt_state)
    for state in _wrappers.get_states(opt_state):
        if not state.settings.step_ahead:
            raise ValueError(
                "opt_state has residuals that may be gradients, and not updates of the parameters: "
                "they were made without a step_ahead. Use optax_ext.consolidate(params, "
                "opt_state), and give the gradient to the optimizer after the allreduce."
            )
    _check_nothing_follows(opt_state)
    updates = residual_tree(opt_state, params, _step)
    rest = _consolidate.emptied(opt_state, _kept)
    return optax.apply_updates(params, updates), _nnx.like(given, rest)


def _check_nothing_follows(tree: Any) -> None:
    """Checks that no ``optax.chain`` would have changed the updates that residuals hold."""
    for chain in jax.tree.leaves(tree, is_leaf=lambda node: type(node) is tuple):
        if type(chain) is not tuple or not _wrappers.get_states(chain):
            continue
        first = next(i for i, part in enumerate(chain) if _wrappers.get_states(part))
        # What reduces gradients itself is for other leaves.
        if not all(map(_wrappers.reductions, chain[first:])):
            raise ValueError(
                "opt_state has a transformation after the optimizer in its chain, which flush "
                "would leave out: a leaf that it freezes would move. To freeze leaves, write "
                "optax.partition({'train': optimizer, 'freeze': optax.set_to_zero()}, labels), or "
                "put what is for other leaves first in the chain. Otherwise apply it yourself: "
                "updates, opt_state = optax_ext.consolidate(params, opt_state), then updates, _ = "
                "following.update(updates, its_state, params), and optax.apply_updates(params, "
                "updates)."
            )
        for part in chain:
            _check_nothing_follows(part)


def _step(node: SparseAllreduceState) -> Any:
    """The leaves of the update that leads to the mean of the look-ahead parameters."""
    taken = node.residual.astype(jnp.float32) - _kept(node).astype(jnp.float32)
    return _shards.leaves_of(node, _consolidate.mean(node._replace(residual=taken)))


def _kept(node: SparseAllreduceState) -> jax.Array:
    """The residuals without the shares that workers have looked ahead by."""
    residuals = node.workers // _shards.workers_in_node(node)
    share = _residual.share(node.settings.step_ahead, residuals)
    if share == 1.0:
        return jnp.zeros_like(node.residual)
    return ((1.0 - share) * node.residual).astype(node.residual.dtype)
