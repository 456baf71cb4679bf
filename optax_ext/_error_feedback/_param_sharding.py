"""How parameters are sharded, as a fact that travels with each of them into ``init``.

``init`` of an optax transformation has the parameters as its only argument, and a wrapper passes
some of them on. So each one carries its own PartitionSpec.
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_ext._error_feedback import _layout
from optax_ext._error_feedback._layout import Sharding
from sparse_collectives import AxisName, _axes, _jaxprs


class ParamSharding(NamedTuple):
    """The PartitionSpecs of all parameters, and the mesh.

    Attributes:
      sizes: the sizes of all axes of the mesh, in its order.
      specs: the PartitionSpec of each leaf, by its path.
    """

    sizes: Mapping[Any, int]
    specs: Mapping[str, PartitionSpec]


class _Place(NamedTuple):
    """The fact of one parameter: the sizes of the axes of the mesh, its path, and its spec."""

    sizes: tuple[tuple[Any, int], ...]
    name: str
    spec: PartitionSpec


def sharded(params: Any, given: ParamSharding | None) -> Any:
    """The parameters, in a traced function, such that :func:`sharding_of` finds their sharding."""
    if given is None:
        return params
    sizes = tuple(given.sizes.items())

    def of_leaf(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        return _jaxprs.annotated(leaf, _Place(sizes, name, given.specs[name]))

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def sharding_of(params: Any, axis: AxisName) -> Sharding:
    """The sharding of ``params`` over the axes besides ``axis``; unsharded if they carry none.

    Raises:
      ValueError: a leaf without a sharding among others, or as :func:`of_specs`.
    """
    leaves = jax.tree.leaves(params)
    places: list[_Place] = list(filter(None, map(_jaxprs.fact_of, leaves)))
    if not places:
        return _layout.unsharded([jnp.shape(leaf) for leaf in leaves])
    if len(places) < len(leaves):
        raise ValueError(
            f"a transformation is given {len(leaves)} parameters, of which {len(places)} are those "
            f"of init_state, such as params{places[0].name}, and the others computed from them. "
            "With sharded parameters a wrapper must pass them on as they are, as optax.masked, "
            "multi_transform and optax_ext.bucketed do."
        )
    workers, sizes = _axes.axis_names(axis), dict(places[0].sizes)
    others = {name: n for name, n in sizes.items() if name not in workers}
    # Along an axis of size 1, sharded and whole are the same.
    alone = [name for name in workers if sizes.get(name) == 1]
    specs = [
        (place.name, jnp.shape(leaf), _without(alone, place.spec))
        for place, leaf in zip(places, leaves, strict=True)
    ]
    return of_specs(tuple(others), tuple(others.values()), specs, workers)


def check_found(sharding: Sharding, given: ParamSharding | None, axis: AxisName) -> None:
    """Checks that a state was made with the sharding that the parameters had.

    Raises:
      ValueError: something between ``init_state`` and ``init`` has hidden it.
    """
    workers = _axes.axis_names(axis)
    if given is None or sharding.axes or not sharding.dims or set(given.sizes) <= {*workers}:
        return
    raise ValueError(
        "the init of tx does not see how its parameters are sharded: jax.jit or another "
        "transformation of jax is around it. With sharded parameters take it away from init; "
        "optax_ext.init_state compiles what it calls."
    )


def _without(names: Collection[Any], spec: PartitionSpec) -> PartitionSpec:
    dims = (_axes.axis_names(dim) if dim is not None else () for dim in spec)
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
        split = [_axes.axis_names(names) if names is not None else () for names in spec]
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
