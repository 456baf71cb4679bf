"""No more workers: the residuals as one gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._state import _calls, _find, _shards, _wrappers
from optax_ext._state._residual_tree import residual_tree
from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import extend


def consolidate(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """All residuals as one dense gradient, and the state without them.

    For the end of a training, or before a model is exported: the residuals are
    gradients that the parameters have not seen. The gradient is the mean over the
    workers, as if a step delivered everything. It is not an update yet: give it to
    the part of the optimizer that follows the sparse allreduce. Where the
    residual holds the learning rate (``ok_topk_sgd``) it is subtracted from the
    parameters as it is.

    Args:
      params: the parameters, or anything of their structure and shapes. Leaves that
        no sparse allreduce covers get zeros.
      opt_state: the state of all workers, outside of the mapped function.

    Returns:
      ``(gradient, opt_state)``; the gradient has the tree of ``params``, and the
      dtypes of the gradients.

    Raises:
      ValueError: inside of the mapped function; a state of other parameters, of ``jax.pmap``, or
        of no allreduce of this library; arguments that have changed places.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(2), {"w": 2})
      >>> state = state._replace(residual=jnp.array([[1.0, 2.0], [3.0, 0.0]]))
      >>> gradient, state = consolidate(jnp.zeros(2), state)
      >>> gradient.tolist(), state.residual.tolist()
      ([2.0, 1.0], [[0.0, 0.0], [0.0, 0.0]])
    """
    _check("consolidate(params, opt_state)", params, opt_state)
    gradient = residual_tree(opt_state, params, _mean)
    empty = jax.tree.map(_without_residual, opt_state, is_leaf=_find.is_state)
    return gradient, empty


def flush(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """The parameters with all that waits in residuals applied, and the state without it.

    For the end of a training with an optimizer whose residuals are updates of the parameters:
    :func:`sparse_adamw`, :func:`sparse_sgd`, or another with ``residual(step_ahead=...)``.
    With a learning rate that has fallen to 0 there is little to apply. At a constant rate there is
    much, all at once, and the parameters may be worse for it (docs/training.md): evaluate them as
    they are.

    Args:
      params: the parameters.
      opt_state: the state of all workers, outside of the mapped function.

    Returns:
      ``(params, opt_state)``.

    Raises:
      ValueError: residuals that are gradients (give those of :func:`consolidate` to the
        optimizer behind the allreduce); and as :func:`consolidate`.
    """
    _check("flush(params, opt_state)", params, opt_state)
    for state in _find.get_states(opt_state):
        if not state.settings.step_ahead:
            raise ValueError(
                "opt_state has residuals that may be gradients, and not updates of the parameters: "
                "they were made without a step_ahead. Use optax_ext.consolidate(params, "
                "opt_state), and give the gradient to the optimizer behind the allreduce."
            )
    updates, opt_state = consolidate(params, opt_state)
    return optax.apply_updates(params, updates), opt_state


def _check(call: str, params: Any, opt_state: Any) -> None:
    """There is a state that may hold something, and it is where ``call`` has it."""
    _calls.check_order(f"optax_ext.{call}", params, opt_state)
    if not _wrappers.reductions(opt_state):
        raise ValueError(
            "opt_state has no residuals: no allreduce of optax_ext is in it. Give the state that "
            "the steps were made with, all of it."
        )


def _mean(node: SparseAllreduceState) -> Any:
    if extend.axis_is_bound(node.settings.axis):
        raise ValueError(
            "consolidate was called inside the function mapped over axis "
            f"{node.settings.axis!r}, where each worker sees its own residual. Call it outside."
        )
    _shards.check_all_rows("opt_state", node)
    rows = _shards.part_rows(node, node.residual).astype(jnp.float32)
    # Divided first: the sum may be too large where the mean is not.
    mean = jnp.sum(rows / node.workers, axis=0)
    return _shards.leaves_of(node, mean)


def _without_residual(node: Any) -> Any:
    if not _find.is_state(node):
        return node
    return node._replace(residual=jnp.zeros_like(node.residual))
