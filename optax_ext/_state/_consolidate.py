"""No more workers: the residuals as one gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._state import _find, _shards
from optax_ext._step import _layout
from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import extend


def consolidate(opt_state: Any, params: Any) -> tuple[Any, Any]:
    """All residuals as one dense gradient, and the state without them.

    For the end of a training, or before a model is exported: the residuals are
    gradients that the parameters have not seen. The gradient is the mean over the
    workers, as if a step delivered everything. It is not an update yet: give it to
    the part of the optimizer that follows the sparse allreduce. Where the
    residual holds the learning rate (``ok_topk_sgd``) it is subtracted from the
    parameters as it is.

    Args:
      opt_state: the state of all workers, outside of the mapped function.
      params: the parameters, or anything of their structure and shapes. Leaves that
        no sparse allreduce covers get zeros.

    Returns:
      ``(gradient, opt_state)``; the gradient has the tree of ``params``, and the
      dtypes of the gradients.

    Raises:
      ValueError: inside of the mapped function; a state of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(2), {"w": 2})
      >>> state = state._replace(residual=jnp.array([[1.0, 2.0], [3.0, 0.0]]))
      >>> gradient, state = consolidate(state, jnp.zeros(2))
      >>> gradient.tolist(), state.residual.tolist()
      ([2.0, 1.0], [[0.0, 0.0], [0.0, 0.0]])
    """
    leaves, treedef = jax.tree.flatten(params)
    gradient: list[Any] = [None] * len(leaves)

    def fold(node):
        if not isinstance(node, SparseAllreduceState):
            return node
        if extend.axis_is_bound(node.settings.axis):
            raise ValueError(
                "consolidate was called inside the function mapped over axis "
                f"{node.settings.axis!r}, where each worker sees its own residual. Call it outside."
            )
        _shards.check_all_rows("opt_state", node)
        workers = node.residual.shape[0]
        rows = _shards.rows(node, node.residual).astype(jnp.float32)
        # Divided first: the sum may be too large where the mean is not.
        mean = jnp.sum(rows / workers, axis=0)
        dense = jnp.zeros((node.layout.dense_size,), jnp.float32)
        parts = _layout.unravel(mean, dense, node.layout, saturate=True)
        # A part of the parameters, as in optax.multi_transform, has masks elsewhere.
        parts, tree = jax.tree.flatten(parts, is_leaf=_is_mask)
        if tree != treedef:
            raise ValueError(
                f"opt_state was made for parameters with another tree than params: {tree}, and "
                f"{treedef}. Give the parameters that init was called with."
            )
        for i, part in enumerate(parts):
            if not _is_mask(part):
                gradient[i] = part if gradient[i] is None else gradient[i] + part
        return node._replace(residual=jnp.zeros_like(node.residual))

    opt_state = jax.tree.map(fold, opt_state, is_leaf=_find.is_state)
    dense = [
        jnp.zeros_like(leaf) if part is None else part
        for leaf, part in zip(leaves, gradient, strict=True)
    ]
    return jax.tree.unflatten(treedef, dense), opt_state


def _is_mask(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
