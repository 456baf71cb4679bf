"""Random keys of a step that is written for one device: each worker draws its own numbers."""

import functools
from typing import Any

import jax

from optax_ext._state import _wrappers
from sparse_collectives import AxisName, _axes, _validation


def of_worker(tree: Any, axis: AxisName) -> Any:
    """An argument with its typed keys as this worker's own, but the keys of an optimizer.

    What an optimizer draws after the exchange has to be the same on all workers. A state of optax
    is a named tuple, which stands next to the state of the exchange in a chain.
    """
    if not _wrappers.reductions(tree):
        return _changed(tree, axis)
    if _wrappers.is_reduction(tree):
        return tree
    may_be_chain = type(tree) in (tuple, list, dict)

    def part(node: Any) -> Any:
        if _wrappers.reductions(node):
            return of_worker(node, axis)
        return _changed(node, axis, _is_named_tuple if may_be_chain else None)

    return jax.tree.map(part, tree, is_leaf=lambda node: node is not tree)


def _changed(tree: Any, axis: AxisName, kept: Any = None) -> Any:
    def one(node: Any) -> Any:
        return _own_key(node, axis) if _validation.is_key(node) else node

    return jax.tree.map(one, tree, is_leaf=kept)


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _own_key(keys: Any, axis: AxisName) -> Any:
    fold_in = functools.partial(jax.random.fold_in, data=_axes.axis_index(axis))
    return functools.reduce(lambda f, _: jax.vmap(f), keys.shape, fold_in)(keys)
