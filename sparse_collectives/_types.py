"""The contracts: what a selector, an allreduce and a codec are.

Each is a NamedTuple of pure functions made by a factory, as in optax. All that
changes from step to step is in a state; nothing prints and nothing is global.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax

State = Any


class Communicator(Protocol):
    """An MPI communicator of mpi4py, whose ranks are the workers. It is not hashable."""

    def Get_rank(self) -> int:  # noqa: D102
        ...

    def Get_size(self) -> int:  # noqa: D102
        ...


AxisName = Hashable | tuple[Hashable, ...] | Communicator | tuple[Communicator, ...]


class Selector(NamedTuple):
    """Chooses which entries of a worker's accumulator are sent.

    Attributes:
      init: ``init(layout) -> state``, for a flat buffer with the layers of a
        :class:`sparse_collectives.Layout`; a number of entries is one layer.
      select: ``select(acc f[size], state) -> (PaddedCOO, state, SelectInfo)``.
        The values of the PaddedCOO are ``acc`` at its indices, unchanged.
    """

    init: Callable[..., State]
    select: Callable[..., tuple[Any, State, "SelectInfo"]]


class SelectInfo(NamedTuple):
    """What one worker's selection did.

    Attributes:
      selected: ``i32[]``, entries in the returned buffer.
      overflow: ``i32[]``, entries that passed the threshold and found no slot.
      threshold: ``f32[]``, the magnitude that was used.
    """

    selected: jax.Array
    overflow: jax.Array
    threshold: jax.Array


class SparseAllreduce(NamedTuple):
    """Sums the selections of all workers on an axis: of a mesh, or an MPI communicator.

    Attributes:
      init: ``init(size, axis_size) -> state``. The state holds the same values on
        every worker.
      reduce: ``reduce(coo, state, *, axis) -> (total, undelivered, state, info)``.
        ``total`` (a PaddedCOO, or ``f[size]`` where the result is dense) is the
        same bits on every worker. ``undelivered`` is a PaddedCOO of what this
        worker must keep; an index may occur more than once in it, and its values
        add. Conservation: over the workers, the sum of ``coo`` equals ``total``
        plus the sum of ``undelivered``.
    """

    init: Callable[..., State]
    reduce: Callable[..., tuple[Any, Any, State, "ReduceInfo"]]


class ReduceInfo(NamedTuple):
    """What one call of an allreduce did.

    Attributes:
      delivered: ``i32[]``, entries in the total; equal on all workers.
      overflow: ``i32[]``, entries of this worker that found no slot on the way.
      threshold: ``f32[]``, the global threshold; equal on all workers.
      words: ``f32[]``, 4-byte words each worker received, padding included;
        equal on all workers.
      useful: ``f32[]``, words that this worker sent and that are no padding: a message
        with e entries in c slots counts e / c of its words; dense runs, counts and
        histograms count in full. What is sent is received, so the mean over the
        workers, divided by ``words``, is the occupancy of the messages.
    """

    delivered: jax.Array
    overflow: jax.Array
    threshold: jax.Array
    words: jax.Array
    useful: jax.Array


class Codec(NamedTuple):
    """How value-index pairs, and dense runs of values, are encoded for an exchange.

    A decoded message has the entries of the encoded one, in their order, with
    values that may be rounded and padding that may lie in between. What that
    costs is reported to the sender, so that nothing is lost.

    Attributes:
      encode: ``encode(PaddedCOO[..., c], seed) -> Encoded``. ``seed`` is ``u32[]``
        and fixes the random rounding, where there is one.
      decode: ``decode(i32[..., w], size, dtype) -> PaddedCOO[..., d]``; d >= c.
      encode_dense: ``encode_dense(f[..., m], seed) -> (i32[..., w], f[..., m])``:
        the message, and what the values lose by it.
      decode_dense: ``decode_dense(i32[..., w], m, dtype) -> f[..., m]``.
      exact: whether every message is decoded to the bits that were encoded; then
        ``sent`` is true for all entries and ``error`` is 0.
    """

    encode: Callable[..., "Encoded"]
    decode: Callable[..., Any]
    encode_dense: Callable[..., tuple[jax.Array, jax.Array]]
    decode_dense: Callable[..., jax.Array]
    exact: bool


class Encoded(NamedTuple):
    """A message, and what its receiver will not see.

    Attributes:
      message: ``i32[..., w]``.
      sent: ``bool[..., c]``, the entries that are in the message; false for padding.
      error: ``f[..., c]``, the value minus the decoded one where ``sent``, else 0.
    """

    message: jax.Array
    sent: jax.Array
    error: jax.Array
