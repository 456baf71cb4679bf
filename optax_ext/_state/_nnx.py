"""Optimizer states of flax nnx, whose ``nnx.Optimizer`` puts each array into a variable."""

import sys
from typing import Any

import jax


def nnx() -> Any:
    """The module ``flax.nnx``, if the program has imported it."""
    return sys.modules.get("flax.nnx")


def is_module(x: Any) -> bool:
    """Whether it is a module of flax nnx, which is a pytree."""
    return isinstance(x, getattr(nnx(), "Pytree", ()))


def nodes(tree: Any) -> list[Any]:
    """The modules and variables of a tree that a step updates in place, as ``nnx.jit`` does."""
    state = getattr(nnx(), "State", ())

    def is_node(x: Any) -> bool:
        return is_module(x) or _is_variable(x) or isinstance(x, state)

    found = filter(is_node, jax.tree.leaves(tree, is_leaf=is_node))
    # A State is a value, of which the program returns a new one.
    return [x for x in found if not isinstance(x, state)]


def shared(tree: Any) -> tuple[int, ...]:
    """For each leaf of a tree with variables as leaves, the first that is the same variable."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_variable)
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), i) if _is_variable(x) else i for i, x in enumerate(leaves))


def share(tree: Any, first: tuple[int, ...]) -> Any:
    """A copy of a tree in which variables are the same wherever :func:`shared` found them so.

    ``jax.tree.map`` makes a variable of its own of each place.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_variable)
    return treedef.unflatten(leaves[i] for i in first)


def arrays(opt_state: Any) -> Any:
    """The state with arrays instead of variables; of an ``nnx.Optimizer``, its state."""
    state = _state_of(opt_state)
    leaves, treedef = jax.tree.flatten(state, is_leaf=_is_variable)
    if not any(map(_is_variable, leaves)):
        return state
    return treedef.unflatten(_value(x) if _is_variable(x) else x for x in leaves)


def like(opt_state: Any, found: Any) -> Any:
    """The arrays of ``found``, inside variables where ``opt_state`` has them."""
    kept, treedef = jax.tree.flatten(_state_of(opt_state), is_leaf=_is_variable)
    if not any(map(_is_variable, kept)):
        return found

    left = iter(jax.tree.leaves(found))

    def put(old: Any) -> Any:
        structure = jax.tree.structure(old)
        return structure.unflatten([next(left) for _ in range(structure.num_leaves)])

    return treedef.unflatten(map(put, kept))


def _value(variable: Any) -> Any:
    """The content of a variable: an array, or a mask of optax, which has no leaves."""
    (value,) = jax.tree.leaves(variable, is_leaf=lambda x: x is not variable)
    return value


def _state_of(opt_state: Any) -> Any:
    is_optimizer = isinstance(opt_state, getattr(nnx(), "Optimizer", ()))
    return opt_state.opt_state if is_optimizer else opt_state


def _is_variable(x: Any) -> bool:
    return isinstance(x, getattr(nnx(), "Variable", ()))
