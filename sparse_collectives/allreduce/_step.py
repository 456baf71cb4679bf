"""The state of the allreduces that only count their steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _validation


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


def seed(state: StepState, stage: int, sender: jax.Array) -> jax.Array:
    """The seed of a message, ``u32[]``: another one for each step, stage and sender.

    Replicas that encode the same sum pass the same ``sender``, so that they send
    the same bits.
    """
    # Odd constants: each product is a permutation of the 32-bit words.
    mixed = state.count.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    mixed = mixed ^ (sender.astype(jnp.uint32) * jnp.uint32(0x85EBCA77))
    return mixed + jnp.uint32(stage * 0xC2B2AE3D % 2**32)
