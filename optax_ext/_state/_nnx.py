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


def is_variable(x: Any) -> bool:
    """Whether it is a variable of flax nnx, such as an ``nnx.Param``."""
    return isinstance(x, getattr(nnx(), "Variable", ()))


def arrays(opt_state: Any) -> Any:
    """The state with arrays instead of variables; of an ``nnx.Optimizer``, its state."""
    state = _state_of(opt_state)
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_variable)
    if not any(map(is_variable, leaves)):
        return state
    return treedef.unflatten(_value(x) if is_variable(x) else x for x in leaves)


def like(opt_state: Any, found: Any) -> Any:
    """The arrays of ``found``, inside variables where ``opt_state`` has them."""
    kept, treedef = jax.tree.flatten(_state_of(opt_state), is_leaf=is_variable)
    if not any(map(is_variable, kept)):
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
