"""All processes of a step have the same program and the same arrays.

With different programs they wait for each other.

A collective of processes with different settings ends only when it has timed out, often after half
an hour, and with an error that does not say why.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from optax_ext._state import _host_checks, _wrappers


def check(mesh: Mesh, states: Any, **arguments: Any) -> None:
    """Compares what determines the program, by name, over the processes of the mesh.

    Cost: one exchange of a few words. Nothing is compared in one process, or on a mesh of some of
    the processes, whose others do not call this, or inside ``jax.jit``.
    """
    if _host_checks.is_traced((states, arguments)):
        return
    settings = [state.settings for state in _wrappers.get_states(states)]
    described = {
        # A function has a hash in the text, which may differ between processes.
        "tx": re.sub(r"#[0-9a-f]{8}", "", repr(settings)),
        **{name: _shapes(tree) for name, tree in arguments.items()},
    }
    for name, other in _differing(mesh, {name: x.encode() for name, x in described.items()}):
        raise ValueError(
            f"{name} of process {other} differs from process 0, and a step needs the same program "
            f"on all processes. On process {jax.process_index()} it is {described[name]:.600}."
        )


def check_values(mesh: Any, arrays: dict[str, np.ndarray]) -> None:
    """Compares the bits of arrays by name, as :func:`check` does what determines the program."""
    contents = {name: np.ascontiguousarray(x).reshape(-1) for name, x in arrays.items()}
    for name, _ in _differing(mesh, {name: x.view(np.uint8) for name, x in contents.items()}):
        raise ValueError(
            f"{name} differs between the processes, and all workers need the same. Compute it from "
            "the same seed on all processes, or read it from the same file. (A typed key, "
            "jax.random.key(0), is the same on all processes as well: optax_ext.data_parallel "
            "makes another one of it for each worker.)"
        )


def _differing(mesh: Any, contents: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The names whose bytes differ, each with a process that differs from process 0."""
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) == 1 or len(processes) < jax.process_count():
        return
    mine = np.array([zlib.crc32(x) for x in contents.values()], np.uint32)
    all_of_them = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, len(mine))
    for name, column in zip(contents, all_of_them.T, strict=True):
        for other in np.flatnonzero(column != column[0])[:1].tolist():
            yield name, other


def _shapes(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    return repr([(np.shape(x), str(getattr(x, "dtype", type(x).__name__))) for x in leaves])
