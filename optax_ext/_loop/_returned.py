"""What a step returned last: a loop that gives it back needs no second look at it."""

import weakref
from typing import Any

import jax
from jax.core import Tracer


class Returned:
    """The arrays that a step returned, by weak references, and where they are.

    They are where they belong, and each has a buffer of its own.

    Args:
      params: the parameters that it returned.
      opt_state: the optimizer state.
      places: where these are.
    """

    def __init__(self, params: Any, opt_state: Any, places: Any):
        leaves, self._structure = jax.tree.flatten((params, opt_state))
        # What is traced is used once.
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        self._leaves = [] if traced else [weakref.ref(leaf) for leaf in leaves]
        self._ids = {id(leaf) for leaf in leaves}
        self._places = places

    def places_of(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """Where they are, if these are the same arrays; None where that is to be found out.

        So it is too of arrays that another step has taken over, or that are in the batch as well.
        """
        leaves, structure = jax.tree.flatten((params, opt_state))
        if len(leaves) != len(self._leaves) or structure != self._structure:
            return None
        if any(known() is not leaf for known, leaf in zip(self._leaves, leaves, strict=True)):
            return None
        examples = jax.tree.leaves(batch)
        if any(map(is_deleted, leaves)) or any(map(is_deleted, examples)):
            return None
        if any(id(leaf) in self._ids for leaf in examples):
            return None
        return self._places


def is_deleted(leaf: Any) -> bool:
    """Whether a step has taken over an array."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
