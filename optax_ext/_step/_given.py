"""How parameters are sharded, told to the ``init`` that is traced from what has the arrays."""

import contextlib
import contextvars
from collections.abc import Collection, Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_ext._step import _layout, _sharding
from optax_ext._step._layout import Sharding
from sparse_collectives import AxisName, _compat


class Given(NamedTuple):
    """The leaves of all parameters, and the mesh.

    Attributes:
      sizes: of all axes of the mesh, in its order.
      specs: by the path of a leaf.
    """

    sizes: Mapping[Any, int]
    specs: Mapping[str, PartitionSpec]


_given: contextvars.ContextVar[Given | None] = contextvars.ContextVar("sharding", default=None)


@contextlib.contextmanager
def sharded(given: Given | None) -> Generator[None]:
    """``init`` of any transformation finds the sharding of its leaves by their paths."""
    token = _given.set(given)
    try:
        yield
    finally:
        _given.reset(token)


def sharding_of(params: Any, axis: AxisName) -> Sharding:
    """Of the leaves of ``params``, over the axes besides ``axis``; whole where nothing is said.

    Raises:
      ValueError: a leaf that was not among those that were given; see :func:`_sharding.of_specs`.
    """
    given = _given.get()
    if given is None:
        return _layout.unsharded([jnp.shape(leaf) for leaf in jax.tree.leaves(params)])
    workers = _compat.axis_names(axis)
    others = {name: n for name, n in given.sizes.items() if name not in workers}
    # Along an axis of one worker, sharded and whole are the same.
    alone = [name for name in workers if given.sizes.get(name) == 1]
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if name not in given.specs:
            raise ValueError(
                f"a transformation is given params{name}, which is no path of the parameters that "
                f"are sharded: {', '.join(list(given.specs)[:5])}, ... What is around it must keep "
                "their paths, as optax.masked, multi_transform and optax_ext.bucketed do."
            )
        leaves.append((name, jnp.shape(leaf), _without(alone, given.specs[name])))
    return _sharding.of_specs(tuple(others), tuple(others.values()), leaves, workers)


def _without(names: Collection[Any], spec: PartitionSpec) -> PartitionSpec:
    dims = (_compat.axis_names(dim) if dim is not None else () for dim in spec)
    return PartitionSpec(*(tuple(n for n in dim if n not in names) or None for dim in dims))
