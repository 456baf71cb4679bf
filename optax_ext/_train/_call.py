"""The arguments of a step that is written for one device: which of their arrays go where."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_ext._state import _find, _placement, _specs, _wrappers
from optax_ext._train import _ahead, _examples, _graph, _places
from sparse_collectives import AxisName, _axes

WHOLE = PartitionSpec()
_ARRAY, _NUMBERS = object(), {float, complex}


@dataclasses.dataclass(eq=False)
class Plan:
    """What calls have in common whose arguments are of one structure, in shapes and types as well.

    Attributes:
      is_batch: whether each argument is part of the batch.
      mesh: the mesh of the optimizer state, with Auto axes.
      axis: the axis of the workers.
      structure: of the arguments.
      arrays: the leaves that are arrays, by their positions.
      specs: their specs.
      in_batch: whether each of them belongs to the batch.
      numbers: the leaves that become arrays, by their positions.
      of_state: a leaf of the optimizer state.
    """

    is_batch: tuple[bool, ...]
    mesh: Mesh
    axis: AxisName
    structure: Any
    arrays: tuple[int, ...]
    specs: tuple[PartitionSpec, ...]
    in_batch: tuple[bool, ...]
    numbers: tuple[int, ...]
    of_state: int

    @classmethod
    def of(cls, args: tuple[Any, ...], chosen: _examples.Chosen) -> Plan:
        """The plan of a call.

        Raises:
          ValueError: an optimizer state on no mesh, of sharded parameters or of local steps.
          ValueError: a batch that is not clear among the arguments.
        """
        axis, placed = _find.axis_of(args), _placed(args)
        mesh = _placement.with_auto_axes(placed.sharding.mesh)
        workers = math.prod(mesh.shape[name] for name in _axes.axis_names(axis))
        at = chosen.positions(args, workers)
        is_batch = tuple(i in at for i in range(len(args)))
        leaves: list[Any] = []
        specs: list[PartitionSpec] = []
        in_batch: list[bool] = []
        numbers: list[bool] = []
        for arg, own in zip(args, is_batch, strict=True):
            found = jax.tree.leaves(arg)
            leaves += found
            in_batch += [own] * len(found)
            numbers += [False] * len(found) if own else _are_numbers(arg)
            split = [PartitionSpec(axis)] * len(found)
            specs += split if own else jax.tree.leaves(specs_of(arg))
        arrays = [x or _ahead.is_array(leaf) for x, leaf in zip(numbers, leaves, strict=True)]
        return cls(
            is_batch,
            mesh,
            axis,
            jax.tree.structure(args),
            tuple(itertools.compress(range(len(leaves)), arrays)),
            tuple(itertools.compress(specs, arrays)),
            tuple(itertools.compress(in_batch, arrays)),
            tuple(itertools.compress(range(len(leaves)), numbers)),
            next(i for i, x in enumerate(leaves) if x is placed),
        )

    def fits(self, leaves: list[Any]) -> bool:
        """Whether the optimizer state, in leaves of the same kinds, is on the mesh."""
        place = getattr(leaves[self.of_state], "sharding", None)
        mesh = place.mesh if isinstance(place, NamedSharding) else None
        return isinstance(mesh, Mesh) and _placement.with_auto_axes(mesh) == self.mesh

    def with_arrays(self, leaves: list[Any]) -> list[Any]:
        """The leaves, with weakly typed arrays for floats that are in no model.

        They are alone, in containers of Python, or in an optimizer state.
        """
        for i in self.numbers:
            leaves[i] = jnp.asarray(leaves[i])
        return leaves

    def put(self, arrays: list[Any]) -> list[Any]:
        """The arrays, in their places on the mesh."""
        return _places.put_leaves(arrays, self._shardings, self._name)

    @functools.cached_property
    def _shardings(self) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, spec) for spec in self.specs]

    def _name(self, i: int) -> str:
        """An array, as the argument that has it and its place there."""
        places = self.structure.unflatten(range(self.structure.num_leaves))
        paths = jax.tree_util.tree_leaves_with_path(places)
        (argument, *path), _ = next(leaf for leaf in paths if leaf[1] == self.arrays[i])
        return f"argument {argument.idx}{jax.tree_util.keystr(tuple(path))}"


@dataclasses.dataclass(eq=False)
class Program:
    """A program; after a number has become an array, as a step returns it, it is the same.

    Attributes:
      plan: of the first call.
      fixed: what :func:`split` arguments have besides arrays.
      graph: of the modules of the arguments, without arrays.
      results: what :func:`split` results have besides arrays, the kind of each array, and their
        graph; set when the program is traced.
    """

    plan: Plan
    fixed: tuple[Any, ...]
    graph: _graph.Graph | None
    results: Any = None


def kind_of(leaf: Any) -> Any:
    """What a plan depends on."""
    return (np.shape(leaf), leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)


def shape_of(array: Any) -> Any:
    """The shape and the type of an array, or of a number."""
    return np.shape(array), getattr(array, "dtype", None) or jnp.result_type(array)


def constant_of(leaf: Any) -> Any:
    """What a program depends on: True is not 1.0, nor -0.0 0.0, and NaN is NaN."""
    return type(leaf), repr(leaf) if type(leaf) in _NUMBERS else leaf


def split(leaves: list[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The arrays among the leaves, and all else, which is static."""
    fixed = tuple(_ARRAY if _ahead.is_array(x) else x for x in leaves)
    return [x for x, other in zip(leaves, fixed, strict=True) if other is _ARRAY], fixed


def filled(fixed: tuple[Any, ...], arrays: Any) -> list[Any]:
    """The leaves that :func:`split` has taken apart."""
    left = iter(arrays)
    return [next(left) if x is _ARRAY else x for x in fixed]


def specs_of(tree: Any) -> Any:
    """The specs of each part of a tuple alone, since ``state_specs`` fails on ``nnx.Rngs``."""
    if type(tree) in (tuple, list):
        return list(map(specs_of, tree))
    if _wrappers.reductions(tree):
        return _specs.state_specs(tree)
    return jax.tree.map(lambda _: WHOLE, tree)


def _are_numbers(arg: Any) -> list[bool]:
    """Whether each leaf of an argument becomes an array."""
    if isinstance(arg, list | tuple | dict):
        parts = jax.tree.leaves(arg, is_leaf=lambda x: x is not arg)
        return [found for part in parts for found in _are_numbers(part)]
    leaves = jax.tree_util.tree_leaves_with_path(arg)
    found = [type(x) in _NUMBERS for _, x in leaves]
    if not any(found) or type(arg) in _NUMBERS:
        return found
    held = bool(_wrappers.reductions(arg))
    named = [held and "opt_state" in jax.tree_util.keystr(path) for path, _ in leaves]
    return list(map(operator.and_, found, named))


def _placed(args: Any) -> Any:
    """An array of the optimizer state, whose parameters are whole on each device of its mesh."""
    states = _wrappers.get_states(args)
    in_rounds = _wrappers.moving(args) or any(state.settings.every > 1 for state in states)
    if in_rounds or any(state.layout.sharding.axes for state in states):
        raise ValueError(
            "data_parallel is for parameters that are whole on each device, and for exchanges at "
            "every step: use optax_ext.make_train_step(loss_fn, tx, mesh)."
        )
    for x in jax.tree.leaves(_wrappers.reductions(args)):
        if isinstance(x, Tracer):
            raise ValueError(
                "data_parallel compiles the step: call it outside of jax.jit, jax.lax.scan and "
                "jax.eval_shape. A step of optax_ext.make_train_step(..., donate=False) can be "
                "called inside of them."
            )
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
    raise ValueError(
        "the optimizer state is on no mesh. Make a new one with optax_ext.init_state(tx, params, "
        "mesh), or give optax_ext.with_mesh(tx, mesh) to what calls tx.init. Put a restored one "
        "on the mesh with opt_state = optax_ext.reshard(opt_state, optax_ext.init_state(tx, "
        "params, mesh)), which keeps its residuals."
    )


_MANY = 8


def warn_of_constants(programs: Any, structure: Any, fixed: tuple[Any, ...]) -> None:
    """Warns at a program after several that differ in their constants only."""
    others = [known.fixed for known in programs.values() if known.plan.structure == structure]
    if len(others) == _MANY and others[-1] != fixed:
        before, now = next((x, y) for x, y in zip(others[-1], fixed, strict=True) if x != y)
        warnings.warn(
            "data_parallel compiles the step anew, and keeps its program, whenever a constant in "
            f"its arguments changes, as now from {before!r} to {now!r}. Give what changes as an "
            "array, or as an argument of its own.",
            stacklevel=4,
        )
