"""The places of a group's workers on its mesh, and each worker's part of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_ext._state._placement import is_spec
from optax_ext.elastic._jax_internals import Device
from optax_ext.elastic._meeting import Plan


class Seats(NamedTuple):
    """The workers along the axis of a mesh.

    Attributes:
      order: the numbers of their processes.
      devices: one device of each.
    """

    order: tuple[int, ...]
    devices: tuple[Device, ...]


def seats(plan: Plan, devices_of: Callable[[int], Sequence[Device]]) -> Seats:
    """The seats for a plan: each meeting has others, until all have been used.

    XLA keeps a group of CPU devices indefinitely, by the devices in their order, and one that
    broke stays broken.
    """
    size = len(plan.members)
    each = len(devices_of(plan.members[0]))
    shift = plan.number // each**size % size
    order = (*plan.members[shift:], *plan.members[:shift])
    devices = (
        devices_of(process)[plan.number // each**place % each]
        for place, process in enumerate(order)
    )
    return Seats(order, tuple(devices))


def own(tree: Any) -> Any:
    """This process's part of global arrays."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Global arrays from the part of this process.

    It does not communicate with the others, who may be gone, as ``jax.device_put`` would.
    """
    (device,) = mesh.local_devices
    size = mesh.devices.size

    def place(spec: PartitionSpec, x: Any) -> jax.Array:
        shape = (size * x.shape[0], *x.shape[1:]) if len(spec) else x.shape
        part = jax.device_put(x, device)
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), [part])

    if is_spec(specs):
        return jax.tree.map(lambda x: place(specs, x), tree)
    return jax.tree.map(place, specs, tree, is_leaf=is_spec)
