"""The mark of the worker that made a row of the residual; the row counts for that worker only.

Programs that save the state of one worker and give it to all, as ``flax.jax_utils.unreplicate`` and
``replicate`` around a checkpoint do, would otherwise make every worker deliver the same residual.
The mark detects that without a collective and without a pass of its own over the residual: the pass
that adds the gradient applies it.
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
    """``value`` if it belongs to this worker, and zeros otherwise.

    A product instead of a select: XLA may compute the accumulator in several loops, and with a
    select these loops rounded differently, so that a threshold did not match the values compared.
    """
    return value * is_own(owner, axis).astype(value.dtype)


def renewed(owner: jax.Array, axis: AxisName) -> jax.Array:
    """The mark after a step; a negative one if a copy was left out."""
    index = transport.axis_index(axis)
    return jnp.where(is_own(owner, axis), owner, _after_a_copy(index))


def has_left_out(owners: jax.Array) -> jax.Array:
    """Whether each worker has left out a copy since the state was made, by its mark."""
    return owners < 0


def _after_a_copy(index: jax.Array) -> jax.Array:
    return -1 - index
