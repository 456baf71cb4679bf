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
        # A step is traced as a whole, or not; what is traced is used once.
        traced = bool(leaves) and isinstance(leaves[0], Tracer)
        self._leaves = [] if traced else list(map(weakref.ref, leaves))
        self._ids = frozenset(map(id, leaves))
        self._places = places

    def places_of(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """Where they are, if these are the same arrays; None where that is to be found out.

        So it is too of arrays that another step has taken over, or that are in the batch as well.
        """
        leaves, structure = jax.tree.flatten((params, opt_state))
        if len(leaves) != len(self._leaves) or structure != self._structure:
            return None
        if not all(known() is leaf for known, leaf in zip(self._leaves, leaves, strict=True)):
            return None
        examples = jax.tree.leaves(batch)
        if any(leaf.is_deleted() for leaf in leaves) or any(map(is_deleted, examples)):
            return None
        if any(id(leaf) in self._ids for leaf in examples):
            return None
        return self._places


def is_deleted(leaf: Any) -> bool:
    """Whether a step has taken over an array."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
