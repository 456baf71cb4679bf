"""The axes that workers are on: of a mesh, of ``vmap`` and ``pmap``, or MPI communicators."""

import dataclasses
import functools
import math
import sys
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax import lax

from sparse_collectives._types import AxisName


def axis_names(axis: AxisName) -> tuple[Any, ...]:
    """The mesh axis names or communicators of ``axis``, as a tuple."""
    return axis if isinstance(axis, tuple) else (axis,)


def outer_axis(axis: AxisName, inner_axis: AxisName) -> AxisName:
    """The names of ``axis`` that are not in ``inner_axis``.

    Raises:
      ValueError: a name of ``inner_axis`` is not in ``axis``, or nothing is left.
    """
    names, inner = axis_names(axis), axis_names(inner_axis)
    outer = tuple(name for name in names if name not in inner)
    if len(outer) + len(inner) != len(names) or not outer:
        other = outer[0] if outer else "node"
        raise ValueError(
            f"axis={axis!r} must name the axis of the nodes and inner_axis={inner_axis!r}. Write "
            f"axis={(other, *inner)!r}, on a mesh with these axes. (jax.pmap has one axis only; "
            "use jax.shard_map.)"
        )
    return outer[0] if len(outer) == 1 else outer


def is_communicator(axis: AxisName) -> bool:
    """Whether ``axis`` is an MPI communicator, or a tuple with one in it."""
    mpi = sys.modules.get("mpi4py.MPI")  # A program with a communicator has imported it.
    return mpi is not None and any(isinstance(name, mpi.Comm) for name in axis_names(axis))


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A hashable stand-in for an MPI communicator in the tree of a state; it holds P."""

    size: int


def static_axis(axis: AxisName) -> Hashable:
    """``axis`` as static data of a pytree: names as they are, communicators as :class:`Ranks`.

    Raises:
      ValueError: a number, which JAX takes for an axis of an array.
    """
    if not is_communicator(axis):
        if any(isinstance(name, int) for name in axis_names(axis)):
            raise ValueError(
                f"axis={axis!r} must be the name of an axis, or a tuple of names: that of the mesh "
                "in jax.make_mesh((8,), ('data',)), or the axis_name of jax.pmap, is axis='data'."
            )
        return axis
    ranks = tuple(Ranks(comm.Get_size()) for comm in axis_names(axis))
    return ranks if isinstance(axis, tuple) else ranks[0]


def ranks(static: Any) -> int:
    """P of the stand-ins that :func:`static_axis` makes of communicators; 0 for mesh axes."""
    names = axis_names(static)
    if not names or not isinstance(names[0], Ranks):
        return 0
    return math.prod(name.size for name in names)


def axis_is_bound(axis: AxisName) -> bool:
    """Whether every name of ``axis`` is bound by an enclosing mapped function.

    A communicator is always bound.
    """
    if is_communicator(axis):
        return True
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def bound_axes() -> tuple[Hashable, ...]:
    """The names that enclosing mapped functions bind, for a message; empty if jax hides them."""
    from jax.extend import core  # Slow to import, and only needed for errors.

    names = getattr(core, "unsafe_get_axis_names_DO_NOT_USE", tuple)()
    return tuple(name for name in names if isinstance(name, Hashable))


def ambient_mesh() -> Any:
    """The mesh of ``jax.set_mesh``: abstract while jax traces, and None if there is none.

    The result is also None inside a function that is mapped over some axes of the mesh, since that
    function must not map over the others.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty or abstract.manual_axes:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # jax is tracing.
        return abstract


def axis_index(axis: AxisName) -> jax.Array:
    """This worker's number on a bound mesh axis, ``i32[]``; row-major over several axes."""
    names, mesh = axis_names(axis), jax.sharding.get_abstract_mesh()
    if not names or is_simulated(axis) or set(mesh.manual_axes) != set(mesh.axis_names):
        return lax.axis_index(axis)
    first, *others = names
    index = _axis_index_primitive().bind(axis_name=first)
    for name in others:
        index = index * lax.axis_size(name) + _axis_index_primitive().bind(axis_name=name)
    return index


@functools.cache
def _axis_index_primitive() -> Any:
    """``lax.axis_index``, also in a ``shard_map`` inside another one, where jax can't lower it.

    All axes are manual there, so the number of the device gives the number on each axis.
    """
    from jax.extend import core  # Slow to import, and only needed to trace.
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    primitive = core.Primitive("axis_index")

    # The parameter has the name that it has in JAX, by which `_jaxprs.axes_of` finds the axis.
    def typed(*, axis_name: Any) -> Any:
        return jax.make_jaxpr(lambda: lax.axis_index(axis_name))().out_avals[0]

    def lowered(context: Any, *, axis_name: Any) -> Any:
        sizes = dict(context.module_context.axis_context.mesh.shape)
        later = list(sizes)[list(sizes).index(axis_name) + 1 :]
        width = math.prod(sizes[other] for other in later)
        widths, size = (mlir.ir_constant(np.uint32(x)) for x in (width, sizes[axis_name]))
        number = stablehlo.divide(stablehlo.partition_id(), widths)
        integer = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        return [stablehlo.convert(integer, stablehlo.remainder(number, size))]

    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, lowered)
    return primitive


def other_mesh_axes(axis: AxisName) -> tuple[Hashable, ...]:
    """The mesh axes, besides ``axis``, that the enclosing ``shard_map`` or ``pmap`` has bound."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in manual if name not in axis_names(axis))


def is_simulated(axis: AxisName) -> bool:
    """Whether ``axis`` is bound by ``vmap``, and not by ``shard_map`` or ``pmap``."""
    return not set(axis_names(axis)) <= set(jax.sharding.get_abstract_mesh().manual_axes)
