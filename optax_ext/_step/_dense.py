"""The state of a dense allreduce."""

import dataclasses
from collections.abc import Hashable

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """State of :func:`optax_ext.dense`, the same on every worker.

    Attributes:
      count: ``i32[]``, steps taken.
      delivered: ``i32[]``, entries in the last update.
      words: ``f32[]``, 4-byte words that each worker received for the last update.
      axis: the mesh axis of the workers, or a ``Ranks`` for an MPI communicator; static.
    """

    count: jax.Array
    delivered: jax.Array
    words: jax.Array
    axis: Hashable = dataclasses.field(metadata={"static": True})
