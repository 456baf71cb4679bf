"""A state that another optimizer made: what a step then fails with says little."""

import re
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from optax_ext._state import _checkpoint

# Errors that say it already.
_SAID = re.compile(r"\bopt_state|the state was made")


def check(
    error: Exception, tx: optax.GradientTransformation, params: Any, opt_state: Any, mesh: Mesh
) -> None:
    """Raises a clear error if the error of a step comes from a state of another optimizer."""
    if _SAID.search(str(error)):
        return
    try:
        fresh = _checkpoint.abstract_state(tx, params, mesh)
    except Exception:
        return
    if jax.tree.structure(opt_state) == jax.tree.structure(fresh):
        return
    here, there = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (opt_state, fresh)
    )
    differences = [
        f"only {whose} has {names[0] or 'a single array'}"
        for whose, names in (
            ("opt_state", [name for name in here if name not in there]),
            ("a state of tx", [name for name in there if name not in here]),
        )
        if names
    ]
    kinds = [type(tree).__name__ for tree in (opt_state, fresh)]
    raise ValueError(
        "opt_state was made by another optimizer than tx, or was restored without its types: "
        f"{' and '.join(differences) or f'it is a {kinds[0]}, and a state of tx a {kinds[1]}'}. "
        "Give the step a state of this tx (optax_ext.init_state), or restore a checkpoint into "
        "optax_ext.abstract_state(tx, params, mesh)."
    ) from error
