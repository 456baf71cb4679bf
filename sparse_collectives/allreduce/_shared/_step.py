"""The state of the allreduces that only count their steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, _validation


class StepState(NamedTuple):
    """State of an allreduce that varies from step to step what waits and how it rounds.

    Attributes:
      count: ``i32[]``, steps taken; the same on every worker.
    """

    count: jax.Array


def init(size: int, axis_size: int) -> StepState:
    """The state before the first step, for n components and P workers."""
    _validation.check_size(size)
    _validation.check_positive_int("axis_size", axis_size)
    return StepState(count=jnp.zeros((), jnp.int32))


def turn(count: jax.Array, stage: int) -> jax.Array:
    """Which entries wait, in a stage of step ``count i32[]``: ``u32[]``, for windows.

    Unlike any seed, and another one for each stage: a window that depended on the one
    before it, or on what a codec leaves out, could leave out the same entry for ever.
    The same on every worker, so that of an index that all have all parts go together.
    """
    return _hash.combine(count, stage, -1)


def seed(state: StepState, stage: int, sender: jax.Array | int) -> jax.Array:
    """The seed of a message, ``u32[]``: another one for each step, stage and sender.

    Replicas that encode the same sum pass the same ``sender``, so that they send
    the same bits.
    """
    return _hash.combine(state.count, stage, sender)
