"""Transport over the axes of a mesh, inside shard_map, pmap or vmap."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _compat
from sparse_collectives._types import AxisName


def axis_size(axis: AxisName) -> int:
    """The static number of workers P.

    Raises:
      ValueError: ``axis`` is not bound, with what to write instead.
    """
    if not _compat.axis_is_bound(axis):
        raise ValueError(
            f"axis={axis!r} is not bound here: a sparse allreduce runs inside a mapped function. "
            f"Call it under jax.shard_map over a mesh with an axis named {axis!r}, under "
            f"jax.pmap(..., axis_name={axis!r}), or through "
            f"sparse_collectives.simulate(..., axis={axis!r}, axis_size=P)."
        )
    return _compat.axis_size(axis)


def axis_index(axis: AxisName) -> jax.Array:
    """This worker's number, ``i32[]`` in [0, P)."""
    return _compat.axis_index(axis)


def psum(x: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over the workers, the same bits on each."""
    return lax.psum(x, axis)


def pmean(x: jax.Array, axis: AxisName) -> jax.Array:
    """The mean over the workers of a floating ``x``."""
    return lax.pmean(x, axis)


def all_gather(x: jax.Array, axis: AxisName) -> jax.Array:
    """``[P, *x.shape]``, the same on every worker."""
    return _compat.all_gather_replicated(x, axis)


def all_to_all(x: jax.Array, axis: AxisName) -> jax.Array:
    """Block j of ``x[P, ...]`` goes to worker j; row i came from worker i."""
    if _compat.is_simulated(axis):
        # Of what is the same on all workers vmap makes an array of another shape.
        x = jnp.where(axis_index(axis) >= 0, x, jnp.zeros_like(x))
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0)


def psum_scatter(x: jax.Array, axis: AxisName) -> jax.Array:
    """Part j of the sum of ``x[P * m]``, ``[m]``, on worker j."""
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def holds_on_mesh(flags: jax.Array, axis: AxisName) -> jax.Array:
    """Whether each of ``flags`` holds on the whole mesh; the workers of ``axis`` agree on it."""
    others = _compat.other_mesh_axes(axis)
    if not others:
        return flags
    return lax.psum((~flags).astype(jnp.int32), others) == 0


def ppermute(x: jax.Array, axis: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Worker ``source`` sends ``x`` to ``target`` for each pair; the others receive zeros."""
    return _compat.ppermute(x, axis, pairs)
