"""What a training step refuses: another mesh, a batch that can't be split, deleted arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from optax_ext._loop import _arrays, _places
from optax_ext._state import _calls, _find
from sparse_collectives import AxisName, _compat


def axis_on(mesh: Mesh, opt_state: Any) -> Any:
    """The axis that the state was made for, after a check that the mesh has it."""
    axis = _find.axis_of(opt_state)
    _calls.check_axis(axis, mesh.axis_names)
    return axis


def check_workers(mesh: Mesh, opt_state: Any) -> None:
    """Checks that the state is for the workers of the mesh, each with its own residual."""
    axis_on(mesh, opt_state)
    _calls.check_workers(opt_state, mesh)
    # A step leaves out copies silently; here an error can be raised.
    _calls.check_own("opt_state", opt_state)


def check_not_donated(**trees: Any) -> None:
    """Checks that no earlier step has taken over the arrays, which some versions of JAX allow."""
    # This runs at each step, so paths are only looked for if something is wrong.
    if not any(map(_arrays.is_deleted, jax.tree.leaves(trees))):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if _arrays.is_deleted(leaf):
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
    if _arrays.is_traced(arguments):
        name, without = ("round", " without exchange_mesh") if in_rounds else ("step", "")
        raise TypeError(
            f"the {name} was called inside jax.jit or another transformation of JAX, and it is "
            "compiled already: call it without jax.jit, or for a loop inside jax.jit or "
            f"jax.lax.scan make it with optax_ext.make_train_{name}(..., donate=False){without}."
        )


def check_begins(opt_state: Any) -> None:
    """Checks that a round can begin from this state."""
    for state in _find.get_states(opt_state):
        every, count = state.settings.every, state.count
        if not isinstance(count, Tracer) and int(count) % every:
            raise ValueError(
                f"opt_state has taken {int(count)} steps, and is in the middle of a round of "
                f"{every}. Take the rest of its steps with optax_ext.make_train_step."
            )


def check_global(batch: Any, mesh: Mesh, opt_state: Any, in_rounds: bool) -> None:
    """Checks that a batch on a mesh of several processes is a global array."""
    if not mesh.is_multi_process:
        return
    axis = _find.axis_of(opt_state)
    spec = f"None, {axis!r}" if in_rounds else repr(axis)
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        # jit would take it for the examples of all workers, different ones in each process.
        if _places.is_local(leaf):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is an array of this process, but the mesh has "
                "devices of several. Make a global one of the examples that each process has "
                "read: jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, "
                f"jax.sharding.PartitionSpec({spec})), examples)."
            )


def check_batch(batch: Any, mesh: Mesh, axis: AxisName) -> None:
    """Checks that the leading dimension of each leaf can be split over the workers.

    Raises:
      ValueError: a leaf for which it can't.
    """
    workers = math.prod(mesh.shape[name] for name in _compat.axis_names(axis))
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name, shape = f"batch{jax.tree_util.keystr(path)}", jax.numpy.shape(leaf)
        if _is_key(leaf, workers):
            raise ValueError(
                f"{name} is one PRNG key, and each of the {workers} workers of axis {axis!r} has "
                f"its own: give jax.random.split(key, {workers}), a new key at each step, and take "
                f"{name}[0] in the loss."
            )
        if not shape:
            raise ValueError(
                f"{name} is a scalar, and a batch is split over the {workers} workers of axis "
                f"{axis!r} along its leading dimension. Give one for each worker, "
                f"jax.numpy.full({workers}, x), and take {name}[0] in the loss."
            )
        if shape[0] % workers:
            raise ValueError(
                f"{name} has shape {shape}: its leading dimension must be a multiple of the "
                f"{workers} workers of axis {axis!r}. Drop or pad the last examples."
            )


def _is_key(leaf: Any, workers: int) -> bool:
    """Whether it is one key of ``jax.random``, and not an array of integers for the workers."""
    dtype, shape = jax.numpy.result_type(leaf), jax.numpy.shape(leaf)
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return not shape
    return dtype == jax.numpy.uint32 and shape == (2,) and bool(2 % workers)
