"""How parameters are sharded, passed from the caller with the arrays to a traced ``init``."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_ext._step import _layout
from optax_ext._step._layout import Sharding
from sparse_collectives import AxisName, _compat


class Given(NamedTuple):
    """The PartitionSpecs of all parameters, and the mesh.

    Attributes:
      sizes: the sizes of all axes of the mesh, in its order.
      specs: the PartitionSpec of each leaf, by its path.
    """

    sizes: Mapping[Any, int]
    specs: Mapping[str, PartitionSpec]


_given: contextvars.ContextVar[Given | None] = contextvars.ContextVar("sharding", default=None)


@contextlib.contextmanager
def sharded(given: Given | None) -> Generator[None]:
    """In this context ``init`` of a transformation finds the sharding of its leaves by path."""
    token = _given.set(given)
    try:
        yield
    finally:
        _given.reset(token)


def sharding_of(params: Any, axis: AxisName) -> Sharding:
    """The sharding of ``params`` over the axes besides ``axis``; unsharded if none is given.

    Raises:
      ValueError: a leaf whose path is not among the given paths; see also :func:`of_specs`.
    """
    given = _given.get()
    if given is None:
        return _layout.unsharded([jnp.shape(leaf) for leaf in jax.tree.leaves(params)])
    workers = _compat.axis_names(axis)
    others = {name: n for name, n in given.sizes.items() if name not in workers}
    # Along an axis of size 1, sharded and whole are the same.
    alone = [name for name in workers if given.sizes.get(name) == 1]
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if name not in given.specs:
            raise ValueError(
                f"a transformation is given params{name}, which is no path of the sharded "
                f"parameters: {', '.join(list(given.specs)[:5])}, ... A wrapper around it must "
                "keep their paths, as optax.masked, multi_transform and optax_ext.bucketed do."
            )
        leaves.append((name, jnp.shape(leaf), _without(alone, given.specs[name])))
    return of_specs(tuple(others), tuple(others.values()), leaves, workers)


def _without(names: Collection[Any], spec: PartitionSpec) -> PartitionSpec:
    dims = (_compat.axis_names(dim) if dim is not None else () for dim in spec)
    return PartitionSpec(*(tuple(n for n in dim if n not in names) or None for dim in dims))


def of_specs(
    axes: Sequence[Hashable],
    sizes: Sequence[int],
    leaves: Sequence[tuple[str, tuple[int, ...], PartitionSpec]],
    workers: tuple[Hashable, ...],
) -> Sharding:
    """The sharding of leaves, each given as its name, shape and PartitionSpec.

    Raises:
      ValueError: a leaf that is sharded over the axis of the workers, or not evenly.
    """
    made = Sharding(tuple(axes), tuple(sizes), ())
    dims = []
    for name, shape, spec in leaves:
        split = [_compat.axis_names(names) if names is not None else () for names in spec]
        split += [()] * (len(shape) - len(split))
        for at, (length, names) in enumerate(zip(shape, split, strict=True)):
            shared = [n for n in names if n in workers]
            if shared:
                raise ValueError(
                    f"params{name} is sharded over axis {shared[0]!r}, which is the axis of the "
                    f"workers: {spec}. Every worker needs all of the parameters. Shard them over "
                    "another axis of the mesh, or give the transformation another axis."
                )
            if length % made.size(names):
                raise ValueError(
                    f"params{name} has dimension {at} of {length}, which the {made.size(names)} "
                    f"devices of {names} can't share evenly. Pad it, or leave it whole."
                )
        dims.append(tuple(tuple(names) for names in split))
    return dataclasses.replace(made, dims=tuple(dims))
