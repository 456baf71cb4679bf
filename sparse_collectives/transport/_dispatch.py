"""Collectives for any kind of axis, and the words that they take.

A mesh axis uses the collectives of XLA, or functions made of them for slow links
(:mod:`._direct`). An MPI communicator uses the collectives of mpi4jax (:mod:`._mpi`). Algorithms
call the functions here, whatever the axis is.

After each collective comes a function for the words that one worker receives in one execution of
it. A word is four bytes. These functions assume the bandwidth-optimal algorithm, so that a volume
depends on the data and not on how a backend implements the exchange. They are the beta terms of the
alpha-beta model in section 3 of the Ok-Topk paper (https://arxiv.org/abs/2201.07598). Sending and
receiving volumes are equal, summed over the group.
"""

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from sparse_collectives import _axes, _varying
from sparse_collectives._axes import axis_names, is_communicator, is_simulated
from sparse_collectives._types import AxisName
from sparse_collectives.transport import _direct, _mpi


def axis_size(axis: AxisName) -> int:
    """The static number of workers P.

    Raises:
      ValueError: ``axis`` is not bound. The message shows what to write instead.
      ImportError: ``axis`` is a communicator, and mpi4jax is not installed.
    """
    if is_communicator(axis):
        return _mpi.axis_size(axis)
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"axis={axis!r} is not bound here: a sparse allreduce runs inside a mapped function. "
            f"Call it under jax.shard_map over a mesh with an axis named {axis!r}, under "
            f"jax.pmap(..., axis_name={axis!r}), or through "
            f"sparse_collectives.simulate(..., axis={axis!r}, axis_size=P)."
        ) from None


def axis_index(axis: AxisName) -> jax.Array:
    """This worker's number, ``i32[]`` in [0, P)."""
    return _mpi.axis_index(axis) if is_communicator(axis) else _axes.axis_index(axis)


def psum(x: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over the workers, the same bits on each.

    Cost: ``2 L (P-1)/P`` words received, for an ``x`` of L words.
    """
    if is_communicator(axis):
        return _mpi.psum(x, axis)
    return _direct.psum(x, axis) if _direct.is_worth(axis, _bytes(x)) else lax.psum(x, axis)


def pmean(x: jax.Array, axis: AxisName) -> jax.Array:
    """The mean over the workers of a floating ``x``, the same bits on each; costs a psum."""
    if is_communicator(axis):
        return _mpi.pmean(x, axis)
    if _direct.is_worth(axis, _bytes(x)):
        return _direct.psum(x, axis) / axis_size(axis)
    return lax.pmean(x, axis)


def words_of_all_reduce(words: float, P: int) -> float:
    """Words of a reduce-scatter and an allgather (a ring, or Rabenseifner's algorithm).

    Args:
      words: words of the whole operand of one worker.
      P: workers in the group.

    Returns:
      `2 * words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return 2.0 * words * (P - 1) / P


def all_gather(x: jax.Array, axis: AxisName) -> jax.Array:
    """``[P, *x.shape]``, the same on every worker, and typed as such.

    Cost: ``L (P-1)`` words received, for an ``x`` of L words.
    """
    if is_communicator(axis):
        return _mpi.all_gather(x, axis)
    if _direct.is_worth(axis, _bytes(x) * (axis_size(axis) - 1)):
        return _direct.all_gather(x, axis)
    if _varying.is_varying(x, axis):
        return lax.all_gather(x, axis, to="invarying")
    names = axis_names(axis)
    if len(names) > 1 and is_simulated(axis):
        # vmap gathers over one axis only.
        rows = x
        for name in reversed(names):
            rows = lax.all_gather(rows, name)
        return rows.reshape((lax.axis_size(axis), *x.shape))
    return lax.all_gather(x, axis)


def words_of_all_gather(words: float, P: int) -> float:
    """Each worker receives the contribution of every other worker.

    Args:
      words: words of the contribution of one worker.
      P: workers in the group.

    Returns:
      `words * (P - 1)`, in words received per worker.
    """
    _check(words, P)
    return float(words * (P - 1))


def all_to_all(x: jax.Array, axis: AxisName) -> jax.Array:
    """Sends block j of ``x[P, ...]`` to worker j; row i of the result came from worker i.

    Cost: ``L (P-1)/P`` words received, for an ``x`` of L words.
    """
    if is_communicator(axis):
        return _mpi.all_to_all(x, axis)
    if is_simulated(axis):
        # If x is the same on all workers, vmap makes an array of another shape.
        x = jnp.where(axis_index(axis) >= 0, x, jnp.zeros_like(x))
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0)


def words_of_all_to_all(words: float, P: int) -> float:
    """Each worker receives one block from every other worker.

    Args:
      words: words of the whole operand of one worker, all P blocks.
      P: workers in the group.

    Returns:
      `words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return float(words) * (P - 1) / P


def psum_scatter(x: jax.Array, axis: AxisName) -> jax.Array:
    """Part j of the sum of ``x[P * m]``, ``[m]``, on worker j.

    Cost: ``L (P-1)/P`` words received, for an ``x`` of L words.
    """
    if is_communicator(axis):
        return _mpi.psum_scatter(x, axis)
    if _direct.is_worth(axis, _bytes(x)):
        return _direct.psum_scatter(x, axis)
    if len(axis_names(axis)) > 1 and is_simulated(axis):
        # vmap scatters over one axis only.
        parts = lax.psum(x, axis).reshape(lax.axis_size(axis), -1, *x.shape[1:])
        return parts[axis_index(axis)]
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def words_of_reduce_scatter(words: float, P: int) -> float:
    """Each worker receives the parts of its block that the others hold.

    Args:
      words: words of the whole operand of one worker, all P blocks.
      P: workers in the group.

    Returns:
      `words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return float(words) * (P - 1) / P


def ppermute(x: jax.Array, axis: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Worker ``source`` sends ``x`` to worker ``target`` for each pair.

    Each worker is a source at most once and a target at most once; workers that are not
    targets receive zeros. Cost: L words received by each target, for an ``x`` of L words.
    For a branch of a conditional see :func:`holds_on_mesh`.
    """
    if is_communicator(axis):
        return _mpi.ppermute(x, axis, pairs)
    pairs = list(pairs)
    workers = range(lax.axis_size(axis))
    if not is_simulated(axis):
        return lax.ppermute(x, *_in_mesh_order(axis, pairs))
    if len(axis_names(axis)) > 1:
        # vmap permutes over one axis only. (Gathers of the largest n are too large for one axis.)
        sources = np.full(len(workers), -1)
        for source, target in pairs:
            sources[target] = source
        source = jnp.asarray(sources, jnp.int32)[axis_index(axis)]
        received = all_gather(x, axis)[jnp.maximum(source, 0)]
        return jnp.where(source >= 0, received, jnp.zeros_like(received))
    if len(pairs) == len(workers):
        return lax.ppermute(x, axis, pairs)
    # vmap needs every worker to send and to receive; one more message costs nothing there.
    sources, targets = ([pair[end] for pair in pairs] for end in (0, 1))
    idle = zip(
        [worker for worker in workers if worker not in sources],
        [worker for worker in workers if worker not in targets],
        strict=True,
    )
    received = lax.ppermute(x, axis, pairs + list(idle))
    is_target = jnp.any(jnp.asarray(targets, jnp.int32) == axis_index(axis))
    return jnp.where(is_target, received, jnp.zeros_like(received))


def _in_mesh_order(
    axis: AxisName, pairs: list[tuple[int, int]]
) -> tuple[AxisName, list[tuple[int, int]]]:
    """The names in the order of the mesh, in which ``lax.ppermute`` numbers workers, and the pairs.

    (Other collectives number them in the order of the names.)
    """
    names = axis_names(axis)
    known = jax.sharding.get_abstract_mesh().axis_names
    order = sorted(range(len(names)), key=lambda i: known.index(names[i]))
    if order == list(range(len(names))):
        return axis, pairs
    numbers = np.arange(lax.axis_size(axis)).reshape([lax.axis_size(name) for name in names])
    place = np.argsort(numbers.transpose(order).reshape(-1)).tolist()
    ordered = tuple(names[i] for i in order)
    return ordered, [(place[source], place[target]) for source, target in pairs]


def words_of_ppermute(words: float, P: int, pairs: Iterable[Sequence[int]] | None = None) -> float:
    """One message to each target, as a mean over the workers.

    Args:
      words: words of the operand of one worker.
      P: workers in the group.
      pairs: (source, target) pairs; a pair of a worker with itself moves
        nothing. None: every worker receives from another one.

    Returns:
      `words` times the share of workers that receive from another worker, in
      words received per worker.
    """
    _check(words, P)
    if P == 1:
        return 0.0
    if pairs is None:
        return float(words)
    receivers = sum(1 for source, target in pairs if source != target)
    return float(words) * receivers / P


def holds_on_mesh(flags: jax.Array, axis: AxisName) -> jax.Array:
    """Whether each of ``flags``, which the workers of ``axis`` agree on, holds on the whole mesh.

    Use it for the predicate of a ``lax.cond`` or ``lax.switch`` with a ``ppermute`` in a branch.
    XLA makes all devices of the mesh meet in a ppermute, also along the other axes, and a
    program whose groups take different branches never ends. Collectives with groups
    don't need it. Nothing is exchanged if ``axis`` covers the whole mesh, nor over a
    communicator, whose ranks meet no other process.
    """
    if is_communicator(axis):
        return _mpi.holds_on_mesh(flags, axis)
    others = _axes.other_mesh_axes(axis)
    if not others:
        return flags
    return lax.psum((~flags).astype(jnp.int32), others) == 0


def words_of_broadcast(words: float, P: int) -> float:
    """Every worker but the source receives the operand, as a mean over all.

    Args:
      words: words of the operand of the source.
      P: workers in the group.

    Returns:
      `words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return float(words) * (P - 1) / P


def _bytes(x: ArrayLike) -> int:
    # The loss of a train step may be a Python number.
    return math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize


def _check(words: float, P: int) -> None:
    if P < 1:
        raise ValueError(f"`P` is {P}; a group has at least 1 worker.")
    if words < 0:
        raise ValueError(f"`words` is {words}; pass a number of words >= 0.")
