"""The residuals at the end of a training: as one gradient, or applied to the parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optax_ext._state import _host_checks, _index, _nnx, _shards, _wrappers
from optax_ext._state._residual_tree import residual_tree
from optax_ext._step._roles import Role
from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import _compat


def consolidate(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Returns all residuals as one dense gradient, and the state without them.

    Use it at the end of a training, or before a model is exported: residuals hold gradients that
    the parameters have not received. The result is the mean over the workers, as if one step
    delivered everything. It is not an update yet: pass it to the part of the optimizer that
    follows the sparse allreduce. If the residuals already include the learning rate
    (``ok_topk_sgd``), subtract the result from the parameters as it is.

    Args:
      params: the parameters, or anything of their structure and shapes. Leaves that
        no sparse allreduce covers get zeros.
      opt_state: the state of all workers, outside of the mapped function. For a model of flax nnx
        it may be ``optimizer.opt_state``, to which the new one can be assigned.

    Returns:
      ``(gradient, opt_state)``. The gradient has the tree of ``params`` and the
      dtypes of the gradients.

    Raises:
      ValueError: called inside the mapped function; a state of other parameters, of ``jax.pmap``,
        or without an allreduce of this library; arguments that have changed places.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(2), {"w": 2})
      >>> state = state._replace(residual=jnp.array([[1.0, 2.0], [3.0, 0.0]]))
      >>> gradient, state = consolidate(jnp.zeros(2), state)
      >>> gradient.tolist(), state.residual.tolist()
      ([2.0, 1.0], [[0.0, 0.0], [0.0, 0.0]])
    """
    given, opt_state = opt_state, _nnx.arrays(opt_state)
    _check("consolidate(params, opt_state)", params, opt_state)
    gradient = residual_tree(opt_state, params, lambda node: _shards.leaves_of(node, _mean(node)))
    return gradient, _nnx.like(
        given, _emptied(opt_state, lambda node: jnp.zeros_like(node.residual))
    )


def flush(params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Applies the residuals to the parameters, and removes the applied part from the state.

    Use it at the end of a training with an optimizer whose residuals are updates of the parameters:
    :func:`sparse_adamw`, :func:`sparse_sgd`, or another one with ``residual(step_ahead=...)``.

    This is one dense step. If the optimizer has a ``limit``, as :func:`sparse_adamw` has, no entry
    moves further than the largest limit of any step: updates that accumulated over many steps at a
    high learning rate would overshoot if applied at once. The excess stays in the residuals, and
    ``optax_ext.metrics(opt_state)["residual_norm"]`` reports its size. It is small if the
    learning rate has fallen to 0. Without a limit everything is applied.

    Args:
      params: the parameters.
      opt_state: as for :func:`consolidate`.

    Returns:
      ``(params, opt_state)``. P times the change of the parameters, plus the sum of the remaining
      residuals over the workers, equals the sum of the residuals before.

    Raises:
      ValueError: the residuals are gradients (pass the result of :func:`consolidate` to the
        optimizer after the allreduce instead); and as :func:`consolidate`.

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
    _check("flush(params, opt_state)", params, opt_state)
    for state in _wrappers.get_states(opt_state):
        if not state.settings.step_ahead:
            raise ValueError(
                "opt_state has residuals that may be gradients, and not updates of the parameters: "
                "they were made without a step_ahead. Use optax_ext.consolidate(params, "
                "opt_state), and give the gradient to the optimizer after the allreduce."
            )
    updates = residual_tree(opt_state, params, lambda node: _shards.leaves_of(node, _step(node)[0]))
    rest = _emptied(opt_state, _without_step)
    return optax.apply_updates(params, updates), _nnx.like(given, rest)


def _check(call: str, params: Any, opt_state: Any) -> None:
    """Checks that ``opt_state`` has residuals, and that the arguments are where ``call`` says."""
    if _nnx.is_module(params):
        raise TypeError(
            "params is a model of flax nnx. Give its parameters, nnx.state(model, nnx.Param), and "
            "put new ones back with nnx.update(model, params)."
        )
    _host_checks.check_order(f"optax_ext.{call}", params, opt_state)
    if not _wrappers.reductions(opt_state):
        raise ValueError(
            "opt_state has no residuals: no allreduce of optax_ext is in it. Give the state that "
            "the steps were made with, all of it."
        )
    leaves, structure = jax.tree.flatten(opt_state)
    for leaf, known in zip(leaves, _index.index_of(structure).leaves, strict=True):
        moves = known.role is Role.MOVED and not isinstance(leaf, Tracer)
        if moves and bool(jnp.any(leaf != 0)):
            raise ValueError(
                "opt_state is in the middle of a round of optax_ext.local_steps: the steps of the "
                "workers since the last exchange are in no residual, and would be lost. Take steps "
                "until the round ends."
            )


def _mean(node: SparseAllreduceState) -> jax.Array:
    """The mean of the residuals over the workers, ``f32[m, n]``, a row for each of m devices."""
    if _compat.axis_is_bound(node.settings.axis):
        raise ValueError(
            "consolidate was called inside the function mapped over axis "
            f"{node.settings.axis!r}, where each worker sees its own residual. Call it outside."
        )
    _host_checks.check_all_rows("opt_state", node)
    _host_checks.check_own("opt_state", node)
    rows = _shards.part_rows(node, node.residual).astype(jnp.float32)
    # Divide first: the sum may overflow when the mean does not.
    return jnp.sum(rows / node.workers, axis=0)


def _step(node: SparseAllreduceState) -> tuple[jax.Array, jax.Array]:
    """The part of the mean that a dense step applies within the limit, and the excess."""
    mean = _mean(node)
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


def _emptied(opt_state: Any, rest: Callable[[SparseAllreduceState], jax.Array]) -> Any:
    """The state with other residuals."""

    def of(node: Any) -> Any:
        return node._replace(residual=rest(node)) if _wrappers.is_state(node) else node

    return jax.tree.map(of, opt_state, is_leaf=_wrappers.is_state)
