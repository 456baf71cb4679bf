"""Types that say over which mesh axes a value varies, on every supported version of jax.

Under ``shard_map(check_vma=True)`` the type of a value says so, and a result that is to be
replicated must be typed so. ``pmap``, ``vmap`` and ``shard_map(check_vma=False)`` have no such
types, and vmap rejects the casts between them. Over an MPI communicator there is no mapped
function, and each process is one worker. These helpers do what the context needs.
"""

import functools
from collections.abc import Hashable
from typing import Any

import jax
from jax import lax

from sparse_collectives import _jaxprs
from sparse_collectives._axes import axis_names, is_communicator
from sparse_collectives._types import AxisName


def varying_axes(x: Any) -> frozenset[Hashable]:
    """The mesh axes over which the type of ``x`` says that it varies."""
    # jax 0.10 can't find the type of a shape if the compiler places some axes of a mesh.
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", frozenset()))


def is_varying(x: Any, axis: AxisName) -> bool:
    """Whether ``x`` is typed as varying over all names of ``axis``."""
    return not is_communicator(axis) and set(axis_names(axis)) <= varying_axes(x)


def checks_varying(axis: AxisName) -> bool:
    """Whether the enclosing mapped function tracks which values vary; False for MPI ranks."""
    if is_communicator(axis):
        return False
    return set(axis_names(axis)) <= varying_axes(lax.axis_index(axis))


def to_varying(tree: Any, axis: AxisName) -> Any:
    """Types every leaf as varying over ``axis``; a no-op if types are not tracked."""
    if not axis_names(axis) or not checks_varying(axis):
        return tree

    def cast(x):
        missing = tuple(name for name in axis_names(axis) if name not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying_like(x: Any, *others: Any) -> Any:
    """``x``, typed as varying over the axes over which any array or shape in ``others`` varies."""
    axes = frozenset().union(*map(varying_axes, others))

    def cast(x):
        missing = tuple(name for name in axes if name not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    # Not by `to_varying`, which leaves an equation that names the axis.
    return jax.tree.map(cast, x) if axes else x


def to_invarying(x: jax.Array, axis: AxisName) -> jax.Array:
    """Types ``x``, which has the same bits on every worker of ``axis``, as replicated.

    jax gives this type only to results of its own collectives.
    """
    if is_communicator(axis) or (checks_varying(axis) and not is_varying(x, axis)):
        return x
    return _to_invarying_primitive().bind(x, axes=frozenset(axis_names(axis)))


@functools.cache
def _to_invarying_primitive() -> Any:
    def typed(x: Any, *, axes: frozenset[Any]) -> Any:
        kept = getattr(x, "manual_axis_type", None)
        if kept is None:
            return x.update(vma=x.vma - axes)
        return x.update(manual_axis_type=kept.update(varying=kept.varying - axes))

    return _jaxprs.identity("to_invarying", typed)
