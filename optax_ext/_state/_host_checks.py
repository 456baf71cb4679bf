"""Checks on the host, before anything is traced: arguments of calls, and rows of states.

An optimizer state has a row for every worker, and each row must be that worker's own.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from optax_ext._error_feedback import _trace_checks
from optax_ext._error_feedback._roles import Rows
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _index, _wrappers
from sparse_collectives import _axes, _validation


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
    if params is None and opt_state is not None:
        raise TypeError(f"params is None. Write {call}.")
    if isinstance(params, Iterator):
        raise TypeError(
            f"params is a {type(params).__name__}, which is no pytree of arrays: give list(params)."
        )
    if not _index.of(opt_state).axes and _wrappers.reductions(params):
        raise ValueError(
            f"params has a state of optax_ext in it, and opt_state has none: they have changed "
            f"places. Write {call}."
        )


def check_params(params: Any) -> None:
    """The parameters are arrays."""
    advice = (
        "Give the arrays alone, as equinox.filter(model, equinox.is_inexact_array) or "
        "nnx.state(model, nnx.Param) has them."
    )
    _validation.check_arrays("params", params, advice)


def check_differentiable(params: Any) -> None:
    """The parameters are arrays of floats, real or complex: a step takes their gradient."""
    check_params(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if _validation.is_key(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            _validation.check_float(f"params{jax.tree_util.keystr(path)}", jnp.asarray(leaf).dtype)


def check_workers(opt_state: Any, mesh: Mesh) -> None:
    """Checks that the state is for the workers of the mesh, each with its own residual."""
    axis_on(mesh, opt_state)
    arrays = jax.tree_util.tree_leaves_with_path(opt_state)
    for known, (path, x) in zip(_index.of(opt_state).leaves, arrays, strict=True):
        if known.rows is not Rows.NONE and not np.ndim(x):
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} is a single number, and was an array with "
                "a row for each worker. Give it an array of that shape; optax.tree.set gives all "
                "arrays of a name the same value."
            )
    for state in _wrappers.get_states(opt_state):
        check_all_rows("opt_state", state)
        names = _axes.axis_names(state.settings.axis)
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
    # A step leaves out copies silently; here an error can be raised.
    check_own("opt_state", opt_state)


def _described(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"


def check_mesh_axis(axis: Any) -> None:
    """Checks that the axis belongs to a mesh and is not an MPI communicator."""
    if _axes.ranks(axis):
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
    check_mesh_axis(_axes.static_axis(axis))
    missing = [name for name in _axes.axis_names(axis) if name not in names]
    if missing:
        raise ValueError(
            f"axis={axis!r} of the transformation is not an axis of the mesh, whose axes are "
            f"{names}. Make the mesh with jax.make_mesh(({jax.device_count()},), "
            f"({missing[0]!r},)), or give the transformation one of its axes."
        )


def copies(node: SparseAllreduceState) -> np.ndarray:
    """The workers whose residual is a copy of another worker's, ``i32[c]``, in this process.

    Empty for shapes, for tracers, and over MPI, which do not show it.
    """
    owner = node.owner
    said = isinstance(owner, jax.Array | np.ndarray) and not isinstance(owner, Tracer)
    # Over MPI each process has its own row, but the state does not record the rank.
    if not said or _axes.ranks(node.settings.axis):
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
    """Checks that no worker has the residual of another one."""
    for node in _wrappers.get_states(opt_state):
        if len(found := copies(node)):
            raise ValueError(
                f"{name} has the residual of another worker on {len(found)} of "
                f"{node.settings.workers} workers ({_listed(found)}): the state of one was copied "
                "to all, as flax.jax_utils.unreplicate and replicate do, or a mapped function "
                "returned it by out_specs without the axis. Save and restore the whole state with "
                "its leading axis, and write optax_ext.state_specs(opt_state). To continue with "
                "the remaining residuals (the others are lost): optax_ext.reshard(opt_state, "
                "optax_ext.init_state(tx, params, mesh))."
            )


def check_whole(name: str, node: SparseAllreduceState) -> None:
    """Checks that a state has the rows of all workers that it was made for."""
    workers = node.settings.workers
    if np.ndim(node.residual) != 2 or _axes.ranks(node.settings.axis) or node.workers >= workers:
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
    workers, rows = _axes.ranks(node.settings.axis), node.workers
    if workers and rows != workers:
        raise ValueError(
            f"{name} was made over an MPI communicator of {workers} ranks and has the part of "
            f"{rows}; this needs the state of all workers. Gather the parts of the ranks along the "
            "leading axis of what state_specs(state, 'ranks') splits over 'ranks'; a fresh state "
            f"of all is optax_ext.init_state(tx, params, {{'ranks': {workers}}}) with axis='ranks'."
        )


def check_before_accumulation(updates: Any, inner: Any, params: Any) -> None:
    """Checks that gradients before ``inner`` are local, and at ``ahead`` if it looks ahead."""
    axis = _index.of(inner).axis
    if not _axes.ranks(axis) and _axes.axis_is_bound(axis):
        _trace_checks.check_not_averaged(updates, axis)
    for state in _wrappers.get_states(inner):
        _trace_checks.warn_without_ahead(updates, state, params)


def axis_on(mesh: Mesh, opt_state: Any) -> Any:
    """The axis that the state was made for, after a check that the mesh has it."""
    axis = _index.of(opt_state).axis
    check_axis(axis, mesh.axis_names)
    return axis


def is_traced(tree: Any) -> bool:
    """Whether any leaf belongs to a program that is being traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def is_deleted(leaf: Any) -> bool:
    """Whether a step has taken over an array."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def is_local(x: Any) -> bool:
    """Whether x is an array of this process alone."""
    if isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_not_donated(**trees: Any) -> None:
    """Checks that no earlier step has taken over the arrays, which some versions of JAX allow."""
    # This runs at each step, so paths are only looked for if something is wrong.
    if not any(map(is_deleted, jax.tree.leaves(trees))):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if is_deleted(leaf):
            # The first key is the name of the argument.
            name = path[0].key + jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"{name} has been deleted: an earlier step took it over and updated it in place. "
                "Go on with what that step returned, begin each run with a copy "
                "(jax.tree.map(jax.numpy.copy, params)), or write make_train_step(..., "
                "donate=False)."
            )


def check_not_traced(arguments: Any, in_rounds: bool) -> None:
    """Checks that a step that donates its arguments is not called inside another program."""
    if is_traced(arguments):
        name, without = ("round", " without exchange_mesh") if in_rounds else ("step", "")
        raise TypeError(
            f"the {name} was called inside jax.jit or another transformation of JAX, and it is "
            "compiled already: call it without jax.jit, or for a loop inside jax.jit or "
            f"jax.lax.scan make it with optax_ext.make_train_{name}(..., donate=False){without}."
        )


def check_begins(opt_state: Any) -> None:
    """Checks that a round can begin from this state."""
    for state in _wrappers.get_states(opt_state):
        every, count = state.settings.every, state.count
        if not isinstance(count, Tracer) and int(count) % every:
            raise ValueError(
                f"opt_state has taken {int(count)} steps, and is in the middle of a round of "
                f"{every}. Take the rest of its steps with optax_ext.make_train_step."
            )
