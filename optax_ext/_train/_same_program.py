"""All processes of a step compile the same program: with different ones they wait for each other.

A collective of processes with different settings ends only when it has timed out, often after half
an hour, and with an error that does not say why.
"""

import re
import zlib
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
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) == 1 or len(processes) < jax.process_count():
        return
    if _host_checks.is_traced((states, arguments)):
        return
    settings = [state.settings for state in _wrappers.get_states(states)]
    described = {
        # A function has a hash in the text, which may differ between processes.
        "tx": re.sub(r"#[0-9a-f]{8}", "", repr(settings)),
        **{name: _shapes(tree) for name, tree in arguments.items()},
    }
    mine = np.array([zlib.crc32(text.encode()) for text in described.values()], np.uint32)
    all_of_them = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, len(mine))
    for name, text, column in zip(described, described.values(), all_of_them.T, strict=True):
        others = np.flatnonzero(column != column[0]).tolist()
        if others:
            raise ValueError(
                f"{name} of process {others[0]} differs from process 0, and a step needs the same "
                f"program on all processes. On process {jax.process_index()} it is {text:.600}."
            )


def _shapes(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    return repr([(np.shape(x), str(getattr(x, "dtype", type(x).__name__))) for x in leaves])
