"""Optimizer states in ``flax.serialization``, as dictionaries of their arrays.

flax saves NamedTuples, but no other nodes of a tree. Layout and settings, which are no arrays, come
from the state that is restored into.
"""

import dataclasses
import sys
from typing import Any

from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._error_feedback._layout import TreeLayout
from optax_ext._error_feedback._sparse_state import Settings


def register() -> None:
    """Tells ``flax.serialization`` about our states, if the program has imported it."""
    module = sys.modules.get("flax.serialization")
    if module is None:
        return

    def register_one(cls: type, names: tuple[str, ...]) -> None:
        def to_dict(node: Any) -> dict[str, Any]:
            return {name: module.to_state_dict(getattr(node, name)) for name in names}

        def from_dict(node: Any, found: dict[str, Any]) -> Any:
            arrays = {
                name: module.from_state_dict(getattr(node, name), found[name], name=name)
                for name in names
            }
            return dataclasses.replace(node, **arrays)

        module.register_serialization_state(cls, to_dict, from_dict, override=True)

    register_one(TreeLayout, ())
    register_one(Settings, ())
    register_one(DenseState, tuple(_roles.FIELDS[DenseState]))
