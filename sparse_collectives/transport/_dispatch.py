"""What an axis is decides how its workers reach each other.

An axis of a mesh goes to the collectives of XLA (:mod:`._mesh`), an MPI communicator
to those of mpi4jax (:mod:`._mpi`). Algorithms call the functions here and see neither.
"""

from collections.abc import Sequence
from types import ModuleType

import jax

from sparse_collectives import _compat
from sparse_collectives._types import AxisName
from sparse_collectives.transport import _mesh, _mpi


def _of(axis: AxisName) -> ModuleType:
    return _mpi if _compat.is_communicator(axis) else _mesh


def axis_size(axis: AxisName) -> int:
    """The static number of workers P.

    Raises:
      ValueError: ``axis`` is not bound, with what to write instead.
      ImportError: ``axis`` is a communicator, and mpi4jax is not installed.
    """
    return _of(axis).axis_size(axis)


def axis_index(axis: AxisName) -> jax.Array:
    """This worker's number, ``i32[]`` in [0, P)."""
    return _of(axis).axis_index(axis)


def psum(x: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over the workers, the same bits on each. Receives 2 L (P-1)/P words."""
    return _of(axis).psum(x, axis)


def pmean(x: jax.Array, axis: AxisName) -> jax.Array:
    """The mean over the workers of a floating ``x``, the same bits on each. As :func:`psum`."""
    return _of(axis).pmean(x, axis)


def all_gather(x: jax.Array, axis: AxisName) -> jax.Array:
    """``[P, *x.shape]``, the same on every worker. Receives L (P-1) words."""
    return _of(axis).all_gather(x, axis)


def all_to_all(x: jax.Array, axis: AxisName) -> jax.Array:
    """Block j of ``x[P, ...]`` goes to worker j; row i came from worker i.

    Receives L (P-1)/P words.
    """
    return _of(axis).all_to_all(x, axis)


def psum_scatter(x: jax.Array, axis: AxisName) -> jax.Array:
    """Part j of the sum of ``x[P * m]``, ``[m]``, on worker j. Receives L (P-1)/P words."""
    return _of(axis).psum_scatter(x, axis)


def holds_on_mesh(flags: jax.Array, axis: AxisName) -> jax.Array:
    """Whether each of ``flags``, which the workers of ``axis`` agree on, holds on the whole mesh.

    For the predicate of a ``lax.cond`` or ``lax.switch`` with a ``ppermute`` in a branch:
    XLA makes all devices of the mesh meet in one, also along the other axes, and a
    program whose groups take different branches never ends. Collectives with groups
    don't need it. Nothing is exchanged where ``axis`` is all of the mesh, nor over a
    communicator, whose ranks meet nobody else.
    """
    return _of(axis).holds_on_mesh(flags, axis)


def ppermute(x: jax.Array, axis: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Worker ``source`` sends ``x`` to ``target`` for each pair. Receives L words.

    Each worker is a source at most once and a target at most once; workers that are not
    targets receive zeros. In a branch of a conditional see :func:`holds_on_mesh`.
    """
    return _of(axis).ppermute(x, axis, pairs)
