"""Random keys of a step that is written for one device: each worker draws its own numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext._state import _wrappers
from sparse_collectives import AxisName, _axes, _validation


def of_worker(tree: Any, axis: AxisName) -> Any:
    """An argument with its typed keys as this worker's own, but the keys of an optimizer.

    What an optimizer draws after the exchange has to be the same on all workers. Its state is named
    ``opt_state``, or is all that an argument has without its parameters and single keys.
    """
    if not _wrappers.reductions(tree):
        return _changed(tree, axis)
    if _wrappers.is_reduction(tree):
        return tree
    children, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    is_named = ["opt_state" in jax.tree_util.keystr(path) for path, _ in children]
    others = [node for _, node in children if not _wrappers.reductions(node)]
    is_training = any(is_named) or any(map(_holds_params, others))
    may_have_key = not _is_named_tuple(tree)

    def part(node: Any, named: bool) -> Any:
        if named:
            return node
        if _wrappers.reductions(node):
            return of_worker(node, axis)
        if is_training or (may_have_key and _validation.is_key(node)):
            return _changed(node, axis)
        return node

    pairs = zip(children, is_named, strict=True)
    return structure.unflatten([part(node, named) for (_, node), named in pairs])


def _holds_params(node: Any) -> bool:
    """Whether it may be parameters or a model; states of optax are named tuples."""
    leaves = [] if _is_named_tuple(node) else jax.tree.leaves(node)
    return any(jnp.ndim(x) and not _validation.is_key(x) for x in leaves if hasattr(x, "dtype"))


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _changed(tree: Any, axis: AxisName) -> Any:
    return jax.tree.map(lambda x: _own_key(x, axis) if _validation.is_key(x) else x, tree)


def _own_key(keys: Any, axis: AxisName) -> Any:
    fold_in = functools.partial(jax.random.fold_in, data=_axes.axis_index(axis))
    return functools.reduce(lambda f, _: jax.vmap(f), keys.shape, fold_in)(keys)
