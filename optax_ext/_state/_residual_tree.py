"""What is in residuals, as a tree of the parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._state import _find
from optax_ext._step import _layout
from optax_ext._step._sparse_state import SparseAllreduceState


def residual_tree(
    opt_state: Any, params: Any, vector: Callable[[SparseAllreduceState], jax.Array]
) -> Any:
    """``vector(state) -> f32[n]`` of each allreduce in an optimizer state, at its leaves.

    Args:
      opt_state: the optimizer state.
      params: of the tree and shapes of the parameters. Leaves that no sparse allreduce
        covers get zeros.
      vector: what a state's leaves get.

    Raises:
      ValueError: a state of other parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    found: list[Any] = [None] * len(leaves)
    for state in _find.get_states(opt_state):
        dense = jnp.zeros((state.layout.dense_size,), jnp.float32)
        parts = _layout.unravel(vector(state), dense, state.layout, saturate=True)
        # A part of the parameters, as in optax.multi_transform, has masks elsewhere.
        parts, tree = jax.tree.flatten(parts, is_leaf=_is_mask)
        if tree != treedef:
            raise ValueError(
                f"opt_state was made for parameters with another tree than params: {tree}, and "
                f"{treedef}. Give the parameters that init was called with."
            )
        for i, part in enumerate(parts):
            if not _is_mask(part):
                found[i] = part if found[i] is None else found[i] + part
    whole = [
        jnp.zeros_like(leaf) if part is None else part
        for leaf, part in zip(leaves, found, strict=True)
    ]
    return jax.tree.unflatten(treedef, whole)


def _is_mask(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
