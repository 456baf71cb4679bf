"""The residuals at the end of a training, applied to the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _consolidate, _nnx, _placement, _shards, _wrappers
from optax_ext._state._residual_tree import residual_tree


@_placement.on_auto_axes
def flush(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Applies the residuals to the parameters, and removes the applied part from the state.

    Use it at the end of a training with an optimizer whose residuals are updates of the parameters:
    :func:`sparse_adamw`, :func:`sparse_sgd`, or another one with ``residual(step_ahead=...)``.

    This is one dense step. If the optimizer has a ``limit``, as :func:`sparse_adamw` has, no entry
    moves further than the largest limit of any step: updates that accumulated over many steps at a
    high learning rate would overshoot if applied at once. The excess stays in the residuals, and
    ``optax_ext.metrics(opt_state)["residual_norm"]`` reports its size. It is small if the
    learning rate has fallen to 0. Without a limit everything is applied.

    If the learning rate has fallen to 0, a flush lowered the loss after rounds (``every=``). It
    raised the loss after exchanges of 1 % of the entries or less at every step: those residuals
    hold more than one step may apply. Compare the losses before and after.

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
      >>> residual = jnp.array([[1.0, 4.0], [0.0, 0.0]])
      >>> state = state._replace(residual=residual, limit=jnp.float32(1.5))
      >>> params, state = flush(jnp.zeros(2), state)
      >>> params.tolist(), state.residual.tolist()
      ([0.5, 1.5], [[0.0, 0.5], [0.0, 0.5]])
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
    updates = residual_tree(opt_state, params, lambda node: _shards.leaves_of(node, _step(node)[0]))
    rest = _consolidate.emptied(opt_state, _without_step)
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


def _step(node: SparseAllreduceState) -> tuple[jax.Array, jax.Array]:
    """The part of the mean that a dense step applies within the limit, and the excess."""
    mean = _consolidate.mean(node)
    if not hasattr(node.limit, "dtype"):
        return mean, jnp.zeros_like(mean)
    beyond = mean - jnp.clip(mean, -node.limit, node.limit)
    beyond = jnp.where(jnp.isfinite(mean), beyond, 0.0)
    # The applied and the kept part add up in float32.
    return mean - beyond, beyond


def _without_step(node: SparseAllreduceState) -> jax.Array:
    """The residuals without what a dense step applies."""
    _, beyond = _step(node)
    rows = _shards.part_rows(node, node.residual)
    # The rows add up to P times the excess, as in a step; a node's row is for all its workers.
    beyond = beyond * (node.workers / rows.shape[0])
    rest = _shards.of_part_rows(node, jnp.broadcast_to(beyond, rows.shape))
    kept = node.residual
    placed = isinstance(kept, jax.Array) and not isinstance(kept, Tracer)
    rest = rest.astype(kept.dtype)
    return jax.device_put(rest, kept.sharding) if placed else rest
