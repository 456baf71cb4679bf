"""The state of a dense allreduce."""

import dataclasses
from collections.abc import Hashable
from typing import Annotated

import jax

from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._roles import SHARED


@_roles.declared
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """State of :func:`optax_ext.dense`, the same on every worker.

    Attributes:
      count: ``i32[]``, steps taken, without skipped steps.
      skipped: ``i32[]``, steps skipped because some entry of the mean was not finite.
      delivered: ``i32[]``, entries in the last update.
      words: ``f32[]``, 4-byte words that each worker received for the last update.
      axis: the mesh axis of the workers, or a ``Ranks`` for an MPI communicator; static.
    """

    count: Annotated[jax.Array, SHARED]
    skipped: Annotated[jax.Array, SHARED]
    delivered: Annotated[jax.Array, SHARED]
    words: Annotated[jax.Array, SHARED]
    axis: Annotated[Hashable, "static"] = dataclasses.field(metadata={"static": True})
