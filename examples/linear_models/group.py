"""The workers: devices of one process, of several processes, or ranks of MPI.

A program is written for one worker, with `axis` bound. Its arguments and results are either the
`SAME` on every worker or each worker's `OWN`; of those a process holds the ones of its workers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._data import InputError

SAME, OWN = "same", "own"
_AXIS = "workers"


class MeshGroup:
    """The devices of a mesh; its processes were joined before by `jax.distributed`.

    Attributes:
      axis: what the exchanges get as `axis`.
      workers: P.
      mine: the numbers of the workers in this process.
      leads: whether this process is the one that reports.
      mesh: the mesh.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        self.axis = _AXIS
        self.workers = mesh.size
        here = jax.process_index()
        devices = enumerate(mesh.devices.flat)
        self.mine = [i for i, device in devices if device.process_index == here]
        self.leads = here == 0
        self.mesh = mesh
        self._specs = {SAME: P(), OWN: P(_AXIS)}

    def jit(
        self,
        function: Callable[..., Any],
        ins: Sequence[str],
        outs: Sequence[str],
        donate: Sequence[int] = (),
    ) -> Callable[..., Any]:
        """The program of all workers; `ins` and `outs` say what of it is `SAME` or `OWN`."""

        def worker(*args: Any) -> tuple[Any, ...]:
            args = [_first(x) if kind == OWN else x for x, kind in zip(args, ins, strict=True)]
            results = function(*args)
            return tuple(
                _lead(x) if kind == OWN else x for x, kind in zip(results, outs, strict=True)
            )

        mapped = jax.shard_map(
            worker,
            mesh=self.mesh,
            in_specs=tuple(self._specs[kind] for kind in ins),
            out_specs=tuple(self._specs[kind] for kind in outs),
            # What the exchanges return is the same on all workers, by their contract; to have it
            # typed so, one of them would send its total once more.
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=tuple(donate))

    def own(self, parts: Sequence[Any]) -> Any:
        """Arrays of the workers in this process, one tree each, as an `OWN` argument."""
        sharding = NamedSharding(self.mesh, P(_AXIS))

        def place(*leaves: np.ndarray) -> jax.Array:
            return jax.make_array_from_process_local_data(sharding, np.stack(leaves))

        return jax.tree.map(place, *parts)

    def same(self, tree: Any) -> Any:
        """Arrays that every process has, as a `SAME` argument that stays on the devices."""
        sharding = NamedSharding(self.mesh, P())
        make = jax.make_array_from_process_local_data
        return jax.tree.map(lambda x: make(sharding, np.asarray(x)), tree)

    def mine_of(self, array: jax.Array) -> np.ndarray:
        """The `OWN` results of the workers in this process, with a leading axis."""
        return np.concatenate([shard.data for shard in array.addressable_shards])

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over all processes."""
        if jax.process_count() == 1:
            return list(numbers)
        from jax.experimental import multihost_utils

        # As words: jax has no float64 unless it is asked for.
        words = np.asarray(numbers, np.float64).view(np.uint32)
        gathered = np.ascontiguousarray(multihost_utils.process_allgather(words))
        return np.max(gathered.view(np.float64), axis=0).tolist()


class MpiGroup:
    """The ranks of an MPI communicator, one worker each; as :class:`MeshGroup`."""

    def __init__(self, communicator: Any):
        self.axis = communicator
        self.workers = communicator.Get_size()
        self.mine = [communicator.Get_rank()]
        self.leads = communicator.Get_rank() == 0

    def jit(
        self,
        function: Callable[..., Any],
        ins: Sequence[str],
        outs: Sequence[str],
        donate: Sequence[int] = (),
    ) -> Callable[..., Any]:
        """The program of this rank."""
        del ins, outs
        return jax.jit(function, donate_argnums=tuple(donate))

    def own(self, parts: Sequence[Any]) -> Any:
        """The arrays of this rank."""
        return jax.device_put(parts[0])

    def same(self, tree: Any) -> Any:
        """The arrays themselves."""
        return jax.device_put(tree)

    def mine_of(self, array: jax.Array) -> np.ndarray:
        """What this rank has, with a leading axis."""
        return np.asarray(array)[None]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over all ranks."""
        return np.max(self.axis.allgather(list(numbers)), axis=0).tolist()


Group = MeshGroup | MpiGroup


def on_devices(count: int | None = None) -> MeshGroup:
    """A group of CPU devices: `count` of this process, or all of the processes that have joined.

    Raises:
      InputError: jax runs already, with fewer devices.
    """
    if count is not None:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # jax runs already, as it does in a test: take the devices it has
            pass
    devices = jax.devices("cpu")[:count]
    if count is not None and len(devices) < count:
        raise InputError(f"--workers is {count}, but jax runs with {len(devices)} devices")
    auto = (AxisType.Auto,)
    return MeshGroup(jax.make_mesh((len(devices),), (_AXIS,), axis_types=auto, devices=devices))


def over_mpi() -> MpiGroup:
    """A group of all ranks that `mpirun` has started.

    Raises:
      InputError: mpi4py or mpi4jax can't be imported.
    """
    jax.config.update("jax_platforms", "cpu")
    try:
        import mpi4jax  # noqa: F401
        from mpi4py import MPI
    except ImportError as error:
        raise InputError(
            f"--mpi: {error}. Install both with pip install 'sparse-collectives[mpi]'"
        ) from error
    return MpiGroup(MPI.COMM_WORLD)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _lead(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
