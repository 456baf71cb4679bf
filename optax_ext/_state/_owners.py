"""Outside of the mapped function: whether a state has what each worker kept, and has it once."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from optax_ext._state import _find
from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import _compat

# What becomes of a state that is damaged already.
_GO_ON = (
    "To go on from what is there, the rest being lost: optax_ext.reshard(opt_state, "
    "optax_ext.init_state(tx, params, mesh))"
)


def copies(node: SparseAllreduceState) -> np.ndarray:
    """The workers whose residual is another's, ``i32[c]``, as far as this process has them.

    None of shapes, tracers and ranks, which say nothing.
    """
    owner = node.owner
    said = isinstance(owner, jax.Array | np.ndarray) and not isinstance(owner, Tracer)
    # Over MPI each process has its own row, and not the rank of it.
    if not said or _compat.ranks(node.settings.axis):
        return np.zeros(0, np.int32)
    if isinstance(owner, np.ndarray) or owner.is_fully_addressable:
        read = [(0, np.asarray(owner))]
    else:
        read = [
            (piece.index[0].start or 0, np.asarray(piece.data))
            for piece in owner.addressable_shards
        ]
    found = []
    for first, owners in read:
        # Under pmap there is one axis more.
        owners = owners.reshape(-1)
        index = first + np.arange(len(owners))
        found.extend(index[(owners != index) & (owners != -1 - index)])
    return np.unique(np.asarray(found, np.int32))


def check(name: str, opt_state: Any) -> None:
    """No worker has the residual of another one.

    Raises:
      ValueError: some have, with what to do.
    """
    for node in _find.get_states(opt_state):
        if len(found := copies(node)):
            raise ValueError(
                f"{name} has the residual of another worker on {len(found)} of "
                f"{node.settings.workers} workers ({_listed(found)}): the state of one was copied "
                "to all, as flax.jax_utils.unreplicate and replicate do, or a mapped function "
                "returned it by out_specs without the axis. Save and restore the whole state with "
                f"its leading axis, and write optax_ext.state_specs(opt_state). {_GO_ON}."
            )


def check_whole(name: str, node: SparseAllreduceState) -> None:
    """The state of ``jax.pmap`` or of a mesh, and not that of one worker alone.

    Raises:
      ValueError: it has the rows of fewer workers than it was made for.
    """
    workers = node.settings.workers
    if np.ndim(node.residual) != 2 or _compat.ranks(node.settings.axis) or node.workers >= workers:
        return
    raise ValueError(
        f"{name} has the residual of {node.workers} of {workers} workers, as "
        "flax.jax_utils.unreplicate leaves it: those of the others would be lost. Save the whole "
        "state, with its leading axis (docs/checkpoints.md, pmap)."
    )


def _listed(workers: np.ndarray) -> str:
    return ", ".join(map(str, workers[:8])) + (", ..." if len(workers) > 8 else "")
