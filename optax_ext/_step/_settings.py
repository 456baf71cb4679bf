"""What a state was made for, as the parts declare it: so that a checkpoint can be checked."""

import dataclasses
from collections.abc import Hashable

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a :func:`sparse_allreduce`, as part of its state's tree.

    A pytree without leaves: all of it is static.

    Attributes:
      selector: the selector with its arguments, as ``topk(density=0.01)``; None of one
        that declares no ``spec``, for this and all that follow.
      allreduce: the allreduce with its arguments.
      local: the states of the transformation in front of the accumulation, ``"none"``
        without one. It decides the unit of the residual.
      residual: dtype and decay of the residual.
      correction: the momentum correction with its arguments, ``"none"`` without one.
      axis: the mesh axis of the workers; a ``Ranks`` for an MPI communicator.
      shard_axis: the axes among them over which the buffer is dealt out before anything is
        selected; none but with a hierarchical allreduce.
      decay: that of the residual.
      step_ahead: what of the residual is applied before a gradient is taken; see
        :func:`optax_ext.residual`.
      workers: P that the state was made for; 0 in a transformation, which is for any.
      whole: whether it is a whole optimizer, whose updates are those of the parameters.
    """

    selector: str | None
    allreduce: str | None
    local: str
    residual: str
    correction: str | None
    axis: Hashable
    shard_axis: tuple[Hashable, ...]
    decay: float
    step_ahead: float
    # Rows of the arrays tell states of other numbers apart, and `optax.tree.map_params` has none.
    workers: int = dataclasses.field(default=0, compare=False)
    whole: bool = False
