"""The workers: devices of one process, of several processes, or ranks of MPI.

Arguments and results of a worker's program are the `SAME` on all, or each worker's `OWN`. A process
holds the `OWN` arrays of its workers one after the other along the first dimension.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._data import InputError

_AXIS = "workers"
SAME, OWN = P(), P(_AXIS)


class Group(NamedTuple):
    """The devices of a mesh, whose processes have joined, or the ranks of a communicator."""

    axis: Any  # what the exchanges get
    workers: int
    mine: list[int]  # the numbers of those in this process; 0 is the one that reports
    mesh: jax.sharding.Mesh | None = None

    def jit(self, function: Callable[..., Any], ins: Any, outs: Any, donate: Sequence[int] = ()):
        """The program of all workers; `ins` and `outs` mark its parts as `SAME` or `OWN`."""
        if self.mesh is not None:
            # The results of exchanges are the same on all workers by contract. To prove that to the
            # type system, one of them would have to send its total again, hence check_vma=False.
            given = {"mesh": self.mesh, "in_specs": ins, "out_specs": outs}
            function = jax.shard_map(function, **given, check_vma=False)
        return jax.jit(function, donate_argnums=donate)

    def own(self, parts: Sequence[Any]) -> Any:
        """Arrays of the workers in this process, one tree each, as an `OWN` argument."""
        return self.same(jax.tree.map(lambda *each: np.concatenate(each), *parts), OWN)

    def same(self, tree: Any, spec: P = SAME) -> Any:
        """Arrays that every process has, as a `SAME` argument that stays on the devices."""
        if self.mesh is None:
            return jax.device_put(tree)
        sharding, make = NamedSharding(self.mesh, spec), jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: make(sharding, np.asarray(x)), tree)

    def gathered(self, rows: Any, dtype: Any) -> np.ndarray:
        """The rows ``[m, k]`` of all processes, one below the other, with 4 or 8 bytes an entry."""
        rows = np.ascontiguousarray(rows, dtype)
        if self.mesh is None:
            return np.concatenate(self.axis.allgather(rows))
        # As words, since jax has no float64 by default.
        words = multihost_utils.process_allgather(rows.view(np.uint32), tiled=True)
        return np.ascontiguousarray(words).view(dtype)


def on_devices(count: int | None = None) -> Group:
    """A group of CPU devices: `count` of this process, or all of the processes that have joined."""
    if count is not None:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # jax runs already, as it does in a test: take the devices it has
            pass
    devices = jax.devices("cpu")[:count]
    if count is not None and len(devices) < count:
        raise InputError(f"--workers is {count}, but jax runs with {len(devices)} devices")
    types = (AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), (_AXIS,), axis_types=types, devices=devices)
    here = jax.process_index()
    mine = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == here]
    return Group(_AXIS, mesh.size, mine, mesh)


def over_mpi() -> Group:
    """A group of all ranks that `mpirun` has started."""
    jax.config.update("jax_platforms", "cpu")
    try:
        import mpi4jax  # noqa: F401
        from mpi4py import MPI
    except ImportError as error:
        install = "Install both with pip install 'sparse-collectives[mpi]'"
        raise InputError(f"--mpi: {error}. {install}") from error
    return Group(MPI.COMM_WORLD, MPI.COMM_WORLD.Get_size(), [MPI.COMM_WORLD.Get_rank()])


def join(coordinator: str, workers: int, process: int) -> None:
    """Makes this process one of the group, before anything else of jax runs."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, workers, process, cluster_detection_method="deactivate")
