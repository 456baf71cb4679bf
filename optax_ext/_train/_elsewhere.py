"""Copies arrays to other devices of the same hosts, worker by worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _wrappers

# Fields of a state that an exchange does not read.
_LEFT_HERE = _roles.names(SparseAllreduceState, _roles.LOAD)


def check(exchange_mesh: Mesh, mesh: Mesh) -> None:
    """Checks that each worker has a separate device on either mesh, in one process.

    Raises:
      TypeError: ``exchange_mesh`` is no mesh.
      ValueError: the shapes differ, a device is in both meshes, or the processes differ.
    """
    if not isinstance(exchange_mesh, Mesh):
        raise TypeError(
            f"exchange_mesh must be a jax.sharding.Mesh, got {exchange_mesh!r:.60}. Give one of "
            "other devices, with the axes of mesh."
        )
    if dict(exchange_mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"exchange_mesh has the axes {dict(exchange_mesh.shape)}, and mesh has "
            f"{dict(mesh.shape)}: give the exchange one device for each device of the mesh, with "
            "axes of the same names."
        )
    for there, here in zip(exchange_mesh.devices.flat, mesh.devices.flat, strict=True):
        if there.process_index != here.process_index:
            raise ValueError(
                f"exchange_mesh has device {there} of process {there.process_index} where mesh has "
                f"{here} of process {here.process_index}. Give exchange_mesh its devices in the "
                "same order of processes as mesh."
            )
    both = {*exchange_mesh.devices.flat} & {*mesh.devices.flat}
    if both:
        raise ValueError(
            f"exchange_mesh and mesh both have device {min(both, key=lambda d: d.id)}, which would "
            "run the steps and the exchange one after the other. Give the exchange its own "
            "devices, for example the second device of each process after "
            "jax.config.update('jax_num_cpu_devices', 2)."
        )


def moved(tree: Any, mesh: Mesh) -> Any:
    """The arrays with the same specs on another mesh; each process copies its own shards."""

    def put(x: jax.Array) -> jax.Array:
        spec = x.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
        sharding = NamedSharding(mesh, spec)
        shards = {_key(shard.index): shard.data for shard in x.addressable_shards}
        copies = [
            jax.device_put(shards[_key(index)], device, may_alias=False)
            for device, index in sharding.addressable_devices_indices_map(x.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, copies)

    return jax.tree.map(put, tree)


def _key(index: Any) -> tuple[Any, ...]:
    return tuple((part.start, part.stop) for part in index)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """The static part of an optimizer state and of the parameters, for a jitted exchange.

    Attributes:
      treedef: the tree of the state, whose leaves are the states of allreduces and other arrays.
      others: shape and dtype of each array that an exchange does not read; None for the rest.
      shapes_of: shapes and dtypes of the parameters, flattened.
      params: the tree of the parameters.
    """

    treedef: Any
    others: tuple[tuple[tuple[int, ...], Any] | None, ...]
    shapes_of: tuple[tuple[tuple[int, ...], Any], ...]
    params: Any

    @property
    def shapes(self) -> Any:
        """The parameters, as shapes and dtypes."""
        return self.params.unflatten([jax.ShapeDtypeStruct(*x) for x in self.shapes_of])

    def filled(self, read: list[Any]) -> Any:
        """The state, with zeros for the arrays that an exchange does not read."""
        given = iter(read)
        leaves = [next(given) if x is None else jnp.zeros(*x) for x in self.others]
        return self.treedef.unflatten(leaves)


def split(params: Any, opt_state: Any) -> tuple[list[Any], Skeleton]:
    """The part of a state that an exchange reads, and the rest as a :class:`Skeleton`.

    An exchange reads the states of allreduces, and scalars: hyperparameters and step counts.
    """
    leaves, treedef = jax.tree.flatten(opt_state, is_leaf=_wrappers.is_state)
    read, others = [], []
    for leaf in leaves:
        if _wrappers.is_state(leaf):
            read.append(leaf._replace(**dict.fromkeys(_LEFT_HERE, ())))
        elif not leaf.shape:
            read.append(leaf)
        else:
            others.append((leaf.shape, leaf.dtype))
            continue
        others.append(None)
    flat, tree = jax.tree.flatten(params)
    shapes = tuple((x.shape, x.dtype) for x in flat)
    return read, Skeleton(treedef, tuple(others), shapes, tree)
