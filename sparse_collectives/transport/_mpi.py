"""Transport over an MPI communicator, by mpi4jax: each process is one worker.

There is no mapped function: a program is jitted in every process, and its collectives
are MPI calls that run in the order in which they were traced, also in branches and
loops (mpi4jax orders them as effects). All ranks must trace the same program.

MPI does not specify the order in which it adds floats. Their sums are therefore made here, in
the order of the ranks, which is also the order of XLA's psum over CPU devices; the bits agree.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _axes
from sparse_collectives._types import AxisName

# Separates these messages from other messages on the same communicator.
_TAG = 8201
# Up to this many floats one allgather is faster than two exchanges of fewer words.
_GATHERED = 64


def axis_size(axis: AxisName) -> int:
    """The number of ranks P.

    Raises:
      ImportError: mpi4jax is not installed.
      ValueError: communicators are mixed with names, or are not intracommunicators.
    """
    _library()
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    for comm in _axes.axis_names(axis):
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ValueError(
                f"axis={axis!r} has {comm!r} in it, which is not an intracommunicator that "
                "this process belongs to. Write for example axis=MPI.COMM_WORLD, or a tuple of "
                "communicators made by its Split; a mesh axis can't be mixed with them."
            )
    return math.prod(comm.Get_size() for comm in _axes.axis_names(axis))


def axis_index(axis: AxisName) -> jax.Array:
    """The rank, ``i32[]``, a constant of this process; row-major for a tuple of communicators."""
    index = 0
    for comm in _axes.axis_names(axis):
        index = index * comm.Get_size() + comm.Get_rank()
    return jnp.asarray(index, jnp.int32)


def psum(x: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over the ranks; over a tuple of communicators one sum after the other."""
    for comm in reversed(_axes.axis_names(axis)):
        x = _psum(x, comm)
    return x


def _psum(x: jax.Array, comm: Any) -> jax.Array:
    workers = axis_size(comm)
    if workers == 1 or not x.size:
        return x
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]

        # Exact, so the order does not matter.
        return _library().allreduce(x, op=MPI.SUM, comm=comm)
    if x.size <= _GATHERED:
        return _sum_rows(all_gather(x, comm))
    part = -(-x.size // workers)
    padded = jnp.pad(x.reshape(-1), (0, part * workers - x.size))
    parts = all_gather(psum_scatter(padded, comm), comm)
    return parts.reshape(-1)[: x.size].reshape(x.shape)


def pmean(x: jax.Array, axis: AxisName) -> jax.Array:
    """The mean over the ranks."""
    return psum(x, axis) / axis_size(axis)


def all_gather(x: jax.Array, axis: AxisName) -> jax.Array:
    """``[P, *x.shape]``, the same on every rank."""
    comm, workers = _only(axis)
    if workers == 1 or not x.size:
        return jnp.broadcast_to(x, (workers, *x.shape))
    return _carried(lambda sent: _library().allgather(sent, comm=comm), x)


def all_to_all(x: jax.Array, axis: AxisName) -> jax.Array:
    """Block j of ``x[P, ...]`` goes to rank j; row i came from rank i."""
    comm, workers = _only(axis)
    if workers == 1 or not x.size:
        return x
    return _carried(lambda sent: _library().alltoall(sent, comm=comm), x)


def psum_scatter(x: jax.Array, axis: AxisName) -> jax.Array:
    """Part j of the sum of ``x[P * m]``, ``[m]``, on rank j."""
    _, workers = _only(axis)
    return _sum_rows(all_to_all(x.reshape(workers, -1, *x.shape[1:]), axis))


def holds_on_mesh(flags: jax.Array, axis: AxisName) -> jax.Array:
    """The flags: no other process takes part in the exchanges of the ranks of ``axis``."""
    del axis
    return flags


def ppermute(x: jax.Array, axis: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Rank ``source`` sends ``x`` to ``target`` for each pair; the others receive zeros."""
    comm, _ = _only(axis)
    me = comm.Get_rank()
    target = next((target for source, target in pairs if source == me), None)
    source = next((source for source, target in pairs if target == me), None)
    if not x.size or (source is None and target is None):
        return jnp.zeros_like(x)
    if source == target == me:
        return x

    def exchange(sent: jax.Array) -> jax.Array:
        mpi = _library()
        if source is None:
            mpi.send(sent, target, tag=_TAG, comm=comm)
            return jnp.zeros_like(sent)
        if target is None:
            return mpi.recv(sent, source, tag=_TAG, comm=comm)
        return mpi.sendrecv(sent, sent, source, target, sendtag=_TAG, recvtag=_TAG, comm=comm)

    return _carried(exchange, x)


def _sum_rows(rows: jax.Array) -> jax.Array:
    """The sum of ``rows[P, ...]`` in their order; bfloat16 is summed in float32, as XLA does."""
    dtype = jnp.float32 if rows.dtype == jnp.bfloat16 else rows.dtype
    rows, kept = rows.astype(dtype), rows.dtype
    total, _ = lax.scan(lambda total, row: (total + row, None), rows[0], rows[1:])
    return total.astype(kept)


def _carried(exchange: Any, x: jax.Array) -> jax.Array:
    """Exchanges ``x`` as unsigned integers if MPI has no type for it, as for bfloat16."""
    if x.dtype.itemsize >= 4 or jnp.issubdtype(x.dtype, jnp.integer):
        return exchange(x)
    if x.dtype == jnp.bool_:
        return exchange(x.astype(jnp.uint8)).astype(jnp.bool_)
    bits = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8
    return lax.bitcast_convert_type(exchange(lax.bitcast_convert_type(x, bits)), x.dtype)


def _only(axis: AxisName) -> tuple[Any, int]:
    """The one communicator of ``axis``, and P."""
    names = _axes.axis_names(axis)
    if len(names) != 1:
        raise ValueError(
            f"axis has {len(names)} MPI communicators, over which only sums are made. Pass one "
            "communicator of all workers, such as axis=MPI.COMM_WORLD; a tuple of them is for "
            "hierarchical and torus_2d."
        )
    (comm,) = names
    return comm, axis_size(comm)


def _library() -> Any:
    """mpi4jax, imported at the first use."""
    try:
        import mpi4jax  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "axis is an MPI communicator, and mpi4jax can't be imported. Install it with\n"
            "    pip install 'sparse-collectives[mpi]'\n"
            "which builds it with the mpicc on the PATH; where there is none, pip install mpich "
            "provides one."
        ) from error
    return mpi4jax
