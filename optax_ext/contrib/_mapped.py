"""Helpers for functions that work only inside a mapped function."""

from sparse_collectives import AxisName, _compat, transport


def workers(axis: AxisName, shared: str, instead: str) -> int:
    """P of the bound axis.

    Args:
      axis: a mesh axis, or a tuple of them.
      shared: what the workers share, for the message.
      instead: what to use in a program of one worker, for the message.

    Raises:
      ValueError: the axis is not bound.
    """
    if not _compat.axis_is_bound(axis):
        raise ValueError(
            f"axis={axis!r} is not bound here: its workers share the {shared} inside a mapped "
            f"function. Call it under jax.shard_map over a mesh with an axis named {axis!r}, under "
            f"jax.pmap(..., axis_name={axis!r}), or through sparse_collectives.simulate(..., "
            f"axis={axis!r}, axis_size=P); in a program of one worker use {instead}."
        )
    return transport.axis_size(axis)
