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
    opt_state: Any, params: Any, leaves_of: Callable[[SparseAllreduceState], Any]
) -> Any:
    """``leaves_of(state)``, a tree, of each allreduce in an optimizer state, at its leaves.

    Args:
      opt_state: the optimizer state.
      params: of the tree and shapes of the parameters. Leaves that no sparse allreduce
        covers get zeros.
      leaves_of: what a state's leaves get; :func:`of_vector` makes it of a vector.

    Raises:
      ValueError: a state of other parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    found: list[Any] = [None] * len(leaves)
    for state in _find.get_states(opt_state):
        parts = leaves_of(state)
        # A part of the parameters, as in optax.multi_transform, has masks elsewhere.
        parts, tree = jax.tree.flatten(parts, is_leaf=is_mask)
        if tree != treedef:
            raise ValueError(
                f"opt_state was made for parameters with another tree than params: {tree}, and "
                f"{treedef}. Give the parameters that init was called with."
            )
        for i, part in enumerate(parts):
            if not is_mask(part):
                found[i] = part if found[i] is None else found[i] + part
    whole = [
        jnp.zeros_like(leaf) if part is None else part
        for leaf, part in zip(leaves, found, strict=True)
    ]
    return jax.tree.unflatten(treedef, whole)


def of_vector(vector: jax.Array, layout: _layout.TreeLayout) -> Any:
    """``f32[n]`` as leaves; those that go dense are 0."""
    dense = jnp.zeros((layout.dense_size,), jnp.float32)
    return _layout.unravel(vector, dense, layout, saturate=True)


def is_mask(node: Any) -> bool:
    """Whether it stands for leaves that a part of an optimizer is not given."""
    return isinstance(node, optax.MaskedNode)
