"""Checks of calls from outside: swapped arguments, or arguments of the wrong kind.

An optimizer state has a row for every worker, and each row must be that worker's own.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from optax_ext._state import _find
from optax_ext._step import _gradient_checks
from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import _compat


def check_transformation(call: str, tx: Any, mesh: Any, *kinds: type) -> None:
    """Checks that ``tx`` is a transformation and ``mesh`` a mesh; ``call`` is a correct call."""
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"tx must be an optax.GradientTransformation, got {_described(tx)}. Write {call}."
        )
    if not isinstance(mesh, (Mesh, *kinds)):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {_described(mesh)}. Write {call}.")


def check_order(call: str, params: Any, opt_state: Any) -> None:
    """Checks that ``params`` and ``opt_state`` have not changed places in ``call``."""
    if isinstance(params, Mesh | AbstractMesh):
        raise TypeError(f"params is a mesh. Write {call}.")
    if isinstance(params, Iterator):
        raise TypeError(
            f"params is a {type(params).__name__}, which is no pytree of arrays: give list(params)."
        )
    if _find.reductions(params) and not _find.reductions(opt_state):
        raise ValueError(
            f"params has a state of optax_ext in it, and opt_state has none: they have changed "
            f"places. Write {call}."
        )


def check_workers(opt_state: Any, mesh: Mesh) -> None:
    """Checks that the state has the rows of all workers of the mesh."""
    for state in _find.get_states(opt_state):
        check_all_rows("opt_state", state)
        names = _compat.axis_names(state.settings.axis)
        workers = math.prod(mesh.shape[name] for name in names)
        sharding = state.layout.sharding
        parts = math.prod(mesh.shape[name] for name in sharding.axes)
        rows = state.residual.shape[0]
        if (rows, state.devices) != (workers * parts, parts):
            devices = "" if state.devices == parts == 1 else f" of {state.devices} devices"
            here = "" if state.devices == parts == 1 else f" of {parts}"
            raise ValueError(
                f"opt_state was made for {state.workers} workers{devices}, and the mesh has "
                f"{workers}{here} along {state.settings.axis!r}. Move its residuals to the workers "
                "of the mesh with opt_state = optax_ext.reshard(opt_state, "
                "optax_ext.init_state(tx, params, mesh))."
            )


def _described(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"


def check_mesh_axis(axis: Any) -> None:
    """Checks that the axis belongs to a mesh and is not an MPI communicator."""
    if _compat.ranks(axis):
        raise ValueError(
            "the axis of the transformation is an MPI communicator, and this is for the axes of a "
            "mesh. Over MPI each process is one worker with its own part of the state: call "
            "opt_state = tx.init(params), and write the step without jax.shard_map,\n"
            "    @jax.jit\n"
            "    def step(params, opt_state, batch):\n"
            "        gradients = jax.grad(loss_fn)(params, batch)\n"
            "        updates, opt_state = tx.update(gradients, opt_state, params)\n"
            "        return optax.apply_updates(params, updates), opt_state"
        )


def check_axis(axis: Any, names: tuple[str, ...]) -> None:
    """Checks that every name of ``axis`` is the name of an axis of the mesh."""
    check_mesh_axis(_compat.static_axis(axis))
    missing = [name for name in _compat.axis_names(axis) if name not in names]
    if missing:
        raise ValueError(
            f"axis={axis!r} of the transformation is not an axis of the mesh, whose axes are "
            f"{names}. Make the mesh with jax.make_mesh(({jax.device_count()},), "
            f"({missing[0]!r},)), or give the transformation one of its axes."
        )


# The advice for a state that is already damaged.
_GO_ON = (
    "To continue with the remaining residuals (the others are lost): optax_ext.reshard(opt_state, "
    "optax_ext.init_state(tx, params, mesh))"
)


def copies(node: SparseAllreduceState) -> np.ndarray:
    """The workers whose residual is a copy of another worker's, ``i32[c]``, in this process.

    Empty for shapes, for tracers, and over MPI, which do not show it.
    """
    owner = node.owner
    said = isinstance(owner, jax.Array | np.ndarray) and not isinstance(owner, Tracer)
    # Over MPI each process has its own row, but the state does not record the rank.
    if not said or _compat.ranks(node.settings.axis):
        return np.zeros(0, np.int32)
    if isinstance(owner, np.ndarray) or owner.is_fully_addressable:
        read = [(0, np.asarray(owner))]
    else:
        read = [
            (piece.index[0].start or 0, np.asarray(piece.data))
            for piece in owner.addressable_shards
        ]
    found = []
    for first, owners in read:
        # Under pmap the array has one more axis.
        owners = owners.reshape(-1)
        index = first + np.arange(len(owners))
        found.extend(index[(owners != index) & (owners != -1 - index)])
    return np.unique(np.asarray(found, np.int32))


def check_own(name: str, opt_state: Any) -> None:
    """Checks that no worker has the residual of another one.

    Raises:
      ValueError: some workers do; the message says what to do.
    """
    for node in _find.get_states(opt_state):
        if len(found := copies(node)):
            raise ValueError(
                f"{name} has the residual of another worker on {len(found)} of "
                f"{node.settings.workers} workers ({_listed(found)}): the state of one was copied "
                "to all, as flax.jax_utils.unreplicate and replicate do, or a mapped function "
                "returned it by out_specs without the axis. Save and restore the whole state with "
                f"its leading axis, and write optax_ext.state_specs(opt_state). {_GO_ON}."
            )


def check_whole(name: str, node: SparseAllreduceState) -> None:
    """Checks that a state comes from ``jax.pmap`` or a mesh, and not from a single worker.

    Raises:
      ValueError: it has the rows of fewer workers than it was made for.
    """
    workers = node.settings.workers
    if np.ndim(node.residual) != 2 or _compat.ranks(node.settings.axis) or node.workers >= workers:
        return
    raise ValueError(
        f"{name} has the residual of {node.workers} of {workers} workers, as "
        "flax.jax_utils.unreplicate leaves it: the residuals of the others would be lost. Save the "
        "whole state, with its leading axis (docs/checkpoints.md, pmap)."
    )


def _listed(workers: np.ndarray) -> str:
    return ", ".join(map(str, workers[:8])) + (", ..." if len(workers) > 8 else "")


def check_all_rows(name: str, node: SparseAllreduceState) -> None:
    """Checks that the state has the rows of all workers."""
    if np.ndim(node.residual) != 2:
        raise ValueError(
            f"{name} is a state of jax.pmap: its residual has shape {np.shape(node.residual)}, and "
            "every array has an axis of the devices. This function needs the state of all workers, "
            "whose residual has a row for each. Keep the rows of the arrays that differ between "
            "the workers, and the first copy of all others:\n"
            "    one = jax.tree.map(lambda x: x[0], opt_state)\n"
            "    opt_state = jax.tree.map(\n"
            "        lambda spec, x: x[:, 0] if len(spec) else x[0],\n"
            "        optax_ext.state_specs(one), opt_state,\n"
            "    )"
        )
    check_whole(name, node)
    workers, rows = _compat.ranks(node.settings.axis), node.workers
    if workers and rows != workers:
        raise ValueError(
            f"{name} was made over an MPI communicator of {workers} ranks and has the part of "
            f"{rows}; this needs the state of all workers. Gather the parts of the ranks along the "
            "leading axis of what state_specs(state, 'ranks') splits over 'ranks'; a fresh state "
            f"of all is optax_ext.init_state(tx, params, {{'ranks': {workers}}}) with axis='ranks'."
        )


def check_before_accumulation(updates: Any, inner: Any, params: Any) -> None:
    """Checks that gradients are local, and taken at ``ahead`` if the optimizer needs it.

    Args:
      updates: the gradients.
      inner: the state of the wrapped transformation.
      params: the parameters, or None.
    """
    axis = _find.axis_of(inner)
    if not _compat.ranks(axis) and _compat.axis_is_bound(axis):
        _gradient_checks.check_not_averaged(updates, axis)
    for state in _find.get_states(inner):
        _gradient_checks.warn_without_ahead(updates, state, params)
