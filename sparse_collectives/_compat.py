"""Every branch on a jax version or on the kind of mapped function is here.

Under ``shard_map(check_vma=True)`` a value's type says over which mesh axes it
varies, and a result that is to be replicated must be typed so. ``pmap``,
``vmap`` and ``shard_map(check_vma=False)`` have no such types, and vmap rejects
the casts between them. These helpers do what the context needs.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

AxisName = Hashable | tuple[Hashable, ...]


def axis_names(axis: AxisName) -> tuple[Hashable, ...]:
    """A mesh axis name or a tuple of them, as a tuple."""
    return axis if isinstance(axis, tuple) else (axis,)


def axis_is_bound(axis: AxisName) -> bool:
    """Whether every name of ``axis`` is bound by an enclosing mapped function."""
    try:
        for name in axis_names(axis):
            lax.axis_size(name)
    except NameError:
        return False
    return True


def axis_size(axis: AxisName) -> int:
    """The static number of workers on a bound axis."""
    size = 1
    for name in axis_names(axis):
        size *= lax.axis_size(name)
    return size


def other_mesh_axes(axis: AxisName) -> tuple[Hashable, ...]:
    """The mesh axes, besides ``axis``, that the enclosing ``shard_map`` or ``pmap`` has bound."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in manual if name not in axis_names(axis))


def is_simulated(axis: AxisName) -> bool:
    """Whether ``axis`` is bound by ``vmap``, and not by ``shard_map`` or ``pmap``."""
    return not set(axis_names(axis)) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x) -> frozenset[Hashable]:
    """The mesh axes over which the type of ``x`` says that it varies."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", frozenset()))


def checks_varying(axis: AxisName) -> bool:
    """Whether the enclosing mapped function tracks which values vary."""
    return set(axis_names(axis)) <= varying_axes(lax.axis_index(axis))


def to_varying(tree, axis: AxisName):
    """Types every leaf as varying over ``axis``; a no-op where types are not kept."""
    if not checks_varying(axis):
        return tree

    def cast(x):
        missing = tuple(name for name in axis_names(axis) if name not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def is_varying(x, axis: AxisName) -> bool:
    """Whether ``x`` is typed as varying over all names of ``axis``."""
    return set(axis_names(axis)) <= varying_axes(x)


def all_gather_replicated(x: jax.Array, axis: AxisName) -> jax.Array:
    """``all_gather`` whose result is typed as the same on every worker."""
    if is_varying(x, axis):
        return lax.all_gather(x, axis, to="invarying")
    return lax.all_gather(x, axis)


def ppermute(x: jax.Array, axis: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """``lax.ppermute`` where some workers may send or receive nothing; these get zeros."""
    pairs = list(pairs)
    workers = range(axis_size(axis))
    if len(pairs) == len(workers) or not is_simulated(axis):
        return lax.ppermute(x, axis, pairs)
    # vmap asks every worker to send and to receive; there a message more costs nothing.
    sources, targets = ([pair[end] for pair in pairs] for end in (0, 1))
    idle = zip(
        [worker for worker in workers if worker not in sources],
        [worker for worker in workers if worker not in targets],
        strict=True,
    )
    received = lax.ppermute(x, axis, pairs + list(idle))
    is_target = jnp.any(jnp.asarray(targets) == lax.axis_index(axis))
    return jnp.where(is_target, received, jnp.zeros_like(received))
