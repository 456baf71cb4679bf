"""What an axis is decides how its workers reach each other.

An axis of a mesh goes to the collectives of XLA, an MPI communicator to those of mpi4jax
(:mod:`._mpi`). Algorithms call the functions here and see neither.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _compat
from sparse_collectives._compat import is_communicator
from sparse_collectives._types import AxisName
from sparse_collectives.transport import _mpi


def axis_size(axis: AxisName) -> int:
    """The static number of workers P.

    Raises:
      ValueError: ``axis`` is not bound, with what to write instead.
      ImportError: ``axis`` is a communicator, and mpi4jax is not installed.
    """
    if is_communicator(axis):
        return _mpi.axis_size(axis)
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
    return _mpi.axis_index(axis) if is_communicator(axis) else _compat.axis_index(axis)


def psum(x: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over the workers, the same bits on each. Receives 2 L (P-1)/P words."""
    return _mpi.psum(x, axis) if is_communicator(axis) else lax.psum(x, axis)


def pmean(x: jax.Array, axis: AxisName) -> jax.Array:
    """The mean over the workers of a floating ``x``, the same bits on each. As :func:`psum`."""
    return _mpi.pmean(x, axis) if is_communicator(axis) else lax.pmean(x, axis)


def all_gather(x: jax.Array, axis: AxisName) -> jax.Array:
    """``[P, *x.shape]``, the same on every worker. Receives L (P-1) words."""
    if is_communicator(axis):
        return _mpi.all_gather(x, axis)
    return _compat.all_gather_replicated(x, axis)


def all_to_all(x: jax.Array, axis: AxisName) -> jax.Array:
    """Block j of ``x[P, ...]`` goes to worker j; row i came from worker i.

    Receives L (P-1)/P words.
    """
    if is_communicator(axis):
        return _mpi.all_to_all(x, axis)
    if _compat.is_simulated(axis):
        # Of what is the same on all workers vmap makes an array of another shape.
        x = jnp.where(axis_index(axis) >= 0, x, jnp.zeros_like(x))
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0)


def psum_scatter(x: jax.Array, axis: AxisName) -> jax.Array:
    """Part j of the sum of ``x[P * m]``, ``[m]``, on worker j. Receives L (P-1)/P words."""
    if is_communicator(axis):
        return _mpi.psum_scatter(x, axis)
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def holds_on_mesh(flags: jax.Array, axis: AxisName) -> jax.Array:
    """Whether each of ``flags``, which the workers of ``axis`` agree on, holds on the whole mesh.

    For the predicate of a ``lax.cond`` or ``lax.switch`` with a ``ppermute`` in a branch:
    XLA makes all devices of the mesh meet in one, also along the other axes, and a
    program whose groups take different branches never ends. Collectives with groups
    don't need it. Nothing is exchanged where ``axis`` is all of the mesh, nor over a
    communicator, whose ranks meet nobody else.
    """
    if is_communicator(axis):
        return _mpi.holds_on_mesh(flags, axis)
    others = _compat.other_mesh_axes(axis)
    if not others:
        return flags
    return lax.psum((~flags).astype(jnp.int32), others) == 0


def ppermute(x: jax.Array, axis: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Worker ``source`` sends ``x`` to ``target`` for each pair. Receives L words.

    Each worker is a source at most once and a target at most once; workers that are not
    targets receive zeros. In a branch of a conditional see :func:`holds_on_mesh`.
    """
    if is_communicator(axis):
        return _mpi.ppermute(x, axis, pairs)
    return _compat.ppermute(x, axis, pairs)
