"""Checks of a batch, before a step splits it over the workers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from optax_ext._state import _host_checks, _index
from sparse_collectives import AxisName, _axes, _validation


def check_global(batch: Any, mesh: Mesh, opt_state: Any, in_rounds: bool) -> None:
    """Checks that a batch on a mesh of several processes is a global array."""
    if not mesh.is_multi_process:
        return
    axis = _index.of(opt_state).axis
    spec = f"None, {axis!r}" if in_rounds else repr(axis)
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        # jit would take it for the examples of all workers, different ones in each process.
        if _host_checks.is_local(leaf):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is an array of this process, but the mesh has "
                "devices of several. Make a global one of the examples that each process has "
                "read: jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, "
                f"jax.sharding.PartitionSpec({spec})), examples)."
            )


def check_batch(batch: Any, mesh: Mesh | AbstractMesh, axis: AxisName) -> None:
    """Checks that the leading dimension of each leaf can be split over the workers."""
    workers = math.prod(mesh.shape[name] for name in _axes.axis_names(axis))
    check_examples(batch)
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    for path, leaf in leaves:
        name, shape = f"batch{jax.tree_util.keystr(path)}", np.shape(leaf)
        if is_key(leaf) and not _is_split(leaf, leaves, workers):
            raise ValueError(
                f"{name} is one PRNG key, and each of the {workers} workers of axis {axis!r} has "
                f"its own: give jax.random.split(key, {workers}), a new key at each step, and take "
                f"{name}[0] in the loss."
            )
        if not shape and isinstance(batch, (list, tuple)) and len(batch) > 2:
            raise ValueError(
                f"{name} is a scalar: a batch is one tree whose arrays have the examples along "
                f"their leading dimension, and this is a {type(batch).__name__} of {len(batch)}. "
                "Stack examples with jax.tree.map(lambda *x: numpy.stack(x), *batch); give a "
                f"number to each worker, jax.numpy.full({workers}, x)."
            )
        if not shape:
            raise ValueError(
                f"{name} is a scalar, and a batch is split over the {workers} workers of axis "
                f"{axis!r} along its leading dimension. Give one for each worker, "
                f"jax.numpy.full({workers}, x), and take {name}[0] in the loss."
            )
        if not shape[0]:
            raise ValueError(
                f"{name} has shape {shape}: there are no examples in it, and the mean over none is "
                "not a number. Leave such a batch out."
            )
        if shape[0] % workers:
            raise ValueError(
                f"{name} has shape {shape}: its leading dimension must be a multiple of the "
                f"{workers} workers of axis {axis!r}. Drop or pad the last examples."
            )


def check_examples(batch: Any) -> None:
    """Checks that the leaves of a batch are arrays or numbers."""
    advice = (
        "The leading dimension of each leaf of a batch is split over the workers. Take it out of "
        "the batch; the loss may close over a constant."
    )
    _validation.check_arrays("batch", batch, advice)


def is_key(leaf: Any) -> bool:
    """Whether it is keys of ``jax.random``: typed ones, or the two numbers of an older one."""
    return _validation.is_key(leaf) or (
        jnp.result_type(leaf) == jnp.uint32 and np.shape(leaf) == (2,)
    )


def _is_split(key: Any, leaves: Any, workers: int) -> bool:
    """Whether it is a key for each example, or two numbers that are no key."""
    if _validation.is_key(key):
        return bool(np.shape(key))
    # Beside two examples of another kind it may be two numbers, one for each.
    others = [np.shape(x) for _, x in leaves if not is_key(x)]
    return workers == 1 or bool(others) and all(shape[:1] == (2,) for shape in others)
