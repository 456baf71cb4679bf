"""Calls with arguments in another order, or of another kind, than a function takes."""

import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from optax_ext._state import _find, _shards, _wrappers
from sparse_collectives import _compat


def check_transformation(call: str, tx: Any, mesh: Any, *kinds: type) -> None:
    """``tx`` is a transformation, and ``mesh`` a mesh; ``call`` is how it is written."""
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"tx must be an optax.GradientTransformation, got {_described(tx)}. Write {call}."
        )
    if not isinstance(mesh, (Mesh, *kinds)):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {_described(mesh)}. Write {call}.")


def check_order(call: str, params: Any, opt_state: Any) -> None:
    """The state is where ``call`` has it, and no state is in the place of the parameters."""
    if isinstance(params, Mesh | AbstractMesh):
        raise TypeError(f"params is a mesh. Write {call}.")
    if _wrappers.reductions(params) and not _wrappers.reductions(opt_state):
        raise ValueError(
            f"params has a state of optax_ext in it, and opt_state has none: they have changed "
            f"places. Write {call}."
        )


def check_workers(opt_state: Any, mesh: Mesh) -> None:
    """The state has the rows of all workers of the mesh."""
    for state in _find.get_states(opt_state):
        _shards.check_all_rows("opt_state", state)
        names = _compat.axis_names(state.settings.axis)
        workers = math.prod(mesh.shape[name] for name in names)
        sharding = state.layout.sharding
        parts = math.prod(mesh.shape[name] for name in sharding.axes)
        rows = state.residual.shape[0]
        if (rows, state.devices) != (workers * parts, parts):
            devices = "" if state.devices == parts == 1 else f" of {state.devices} devices"
            here = "" if state.devices == parts == 1 else f" of {parts}"
            raise ValueError(
                f"opt_state is that of {state.workers} workers{devices}, and the mesh has "
                f"{workers}{here} along {state.settings.axis!r}. Make it one of these, with what "
                "the residuals hold: opt_state = optax_ext.reshard(opt_state, "
                "optax_ext.init_state(tx, params, mesh))."
            )


def _described(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"
