"""All processes of a step have the same program and the same arrays.

With different programs they wait for each other.

A collective of processes with different settings ends only when it has timed out, often after half
an hour, and with an error that does not say why.
"""

import re
import zlib
from collections.abc import Callable, Iterator
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
    if not _is_of_all(mesh) or _host_checks.is_traced((states, arguments)):
        return
    settings = [state.settings for state in _wrappers.get_states(states)]
    described = {
        # A function has a hash in the text, which may differ between processes.
        "tx": re.sub(r"#[0-9a-f]{8}", "", repr(settings)),
        **{name: _shapes(tree) for name, tree in arguments.items()},
    }
    for i, other in _differing([text.encode() for text in described.values()]):
        name, text = [*described.items()][i]
        raise ValueError(
            f"{name} of process {other} differs from process 0, and a step needs the same program "
            f"on all processes. On process {jax.process_index()} it is {text:.600}."
        )


def check_values(mesh: Any, arrays: list[np.ndarray], name_of: Callable[[int], str]) -> None:
    """Compares the bits of arrays, as :func:`check` does what determines the program."""
    if not _is_of_all(mesh):
        return
    flat = [np.ascontiguousarray(x).reshape(-1) for x in arrays]
    for i, _ in _differing([x.view(np.uint8) for x in flat]):
        raise ValueError(
            f"{name_of(i)} differs between the processes, and all workers need the same. Compute "
            "it from the same seed on all processes, or read it from the same file. (A typed key, "
            "jax.random.key(0), is the same on all processes as well: optax_ext.data_parallel "
            "makes another one of it for each worker.)"
        )


def _is_of_all(mesh: Any) -> bool:
    """Whether all processes are in the mesh, and there are several."""
    processes = {device.process_index for device in mesh.devices.flat}
    return 1 < len(processes) == jax.process_count()


def _differing(contents: list[Any]) -> Iterator[tuple[int, int]]:
    """The positions whose bytes differ, each with a process that differs from process 0."""
    mine = np.array([zlib.crc32(x) for x in contents], np.uint32)
    all_of_them = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, len(mine))
    for i, column in enumerate(all_of_them.T):
        for other in np.flatnonzero(column != column[0])[:1].tolist():
            yield i, other


def _shapes(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    return repr([(np.shape(x), str(getattr(x, "dtype", type(x).__name__))) for x in leaves])
