"""Whose residual a row of the state is: it counts for the worker that made it, and for no other.

What saves the state of one worker and gives it to all, as ``flax.jax_utils.unreplicate`` and
``replicate`` around a checkpoint do, would have every worker deliver the same residual. A number
beside it tells, without a collective and without a pass over it: the choice is made in the pass
that adds the gradient.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import AxisName, transport


def mark(axis: AxisName) -> jax.Array:
    """The mark of this worker, its index, ``i32[]``."""
    return transport.axis_index(axis)


def is_own(owner: jax.Array, axis: AxisName) -> jax.Array:
    """Whether ``owner``, ``i32[1]``, is a mark of this worker, ``bool[]``."""
    index = transport.axis_index(axis)
    return (owner[0] == index) | (owner[0] == _after_a_copy(index))


def own(value: jax.Array, owner: jax.Array, axis: AxisName) -> jax.Array:
    """``value`` if it is this worker's, and else zeros.

    A product: XLA may compute the accumulator in several loops, and with a choice in it was seen
    to round it in two ways, so that a threshold was not that of what it was compared with.
    """
    return value * is_own(owner, axis).astype(value.dtype)


def renewed(owner: jax.Array, axis: AxisName) -> jax.Array:
    """The mark after a step; one that says so where a copy was left out."""
    index = transport.axis_index(axis)
    return jnp.where(is_own(owner, axis), owner, _after_a_copy(index))


def has_left_out(owners: jax.Array) -> jax.Array:
    """By the marks of workers whether a copy was left out since the state was made."""
    return owners < 0


def _after_a_copy(index: jax.Array) -> jax.Array:
    return -1 - index
