"""The contracts: what a selector, an allreduce and a codec are.

Each is a NamedTuple of pure functions made by a factory, as in optax. All that
changes from step to step is in a state; nothing prints and nothing is global.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax

from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec

State = Any


class Communicator(Protocol):
    """An MPI communicator of mpi4py, whose ranks are the workers. It is not hashable."""

    def Get_rank(self) -> int:  # noqa: D102
        ...

    def Get_size(self) -> int:  # noqa: D102
        ...


AxisName = Hashable | tuple[Hashable, ...] | Communicator | tuple[Communicator, ...]


def _as_made(state: State, number: jax.Array) -> State:
    del number
    return state


class Selector(NamedTuple):
    """Chooses which entries of a worker's accumulator are sent.

    Attributes:
      init: ``init(layout) -> state``, for a flat buffer with the layers of a
        :class:`sparse_collectives.Layout`; a number of entries is one layer.
      select: ``select(acc f[size], state) -> (PaddedCOO, state, SelectInfo)``.
        The values of the PaddedCOO are ``acc`` at its indices, unchanged.
      spec: what it was made as; checkpoints ask for it, and nothing else does.
      apart: ``apart(state, number i32[]) -> state``: of several buffers of one size, the first
        state of the one with that number. For selectors that draw random indices, so that
        buffers do not draw the same; by default the state as it was made. Number 0 has that.
    """

    init: Callable[..., State]
    select: Callable[..., tuple[PaddedCOO, State, "SelectInfo"]]
    spec: Spec | None = None
    apart: Callable[[State, jax.Array], State] = _as_made


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


class Undelivered(NamedTuple):
    """What a worker must keep after an allreduce.

    Attributes:
      slots: ``f[c]``, for each slot of its selection what it keeps of the entry
        there: 0 of one that was delivered whole, all of one that was not.
      others: a PaddedCOO of what it keeps besides: partial sums that found no slot on
        the way, and what encoding rounded off them. An index may occur more than
        once, and its values add. It has 0 slots where there can be no such entries.
      remainder: what it keeps in place of all that it had at the indices of the total,
        selected by itself or not: 0, or what rounding took off. A PaddedCOO with unique
        indices, which goes before ``slots``; None but from an allreduce that is ``complete``.
    """

    slots: jax.Array
    others: PaddedCOO
    remainder: PaddedCOO | None = None

    def residual(self, acc: jax.Array, coo: PaddedCOO) -> jax.Array:
        """What is left of ``acc f[n]`` after its selection ``coo`` was exchanged, ``f[n]``.

        In place where ``acc`` may be overwritten, and in its shape, which may have leading
        axes of 1. Cost: one scatter of c values, and one of the other entries where there
        can be any.
        """
        lead = (0,) * (acc.ndim - 1)
        if self.remainder is None:
            indices, values = coo.indices, self.slots
        else:
            # What was selected and is not in the total is in ``acc`` as it was.
            indices, values = self.remainder.indices, self.remainder.values
        kept = acc.at[(*lead, indices)].set(values.astype(acc.dtype), mode="drop")
        if not self.others.capacity:
            return kept
        added = self.others.values.astype(acc.dtype)
        return kept.at[(*lead, self.others.indices)].add(added, mode="drop")


def _whole(vector: jax.Array) -> jax.Array:
    return vector


def _as_it_is(part: jax.Array, size: int) -> jax.Array:
    del size
    return part


def _all_of_it(acc: jax.Array, state: State, *, axis: AxisName) -> jax.Array:
    del state, axis
    return acc


def _where_it_is(coo: PaddedCOO, size: int, state: State, *, axis: AxisName) -> PaddedCOO:
    del size, state, axis
    return coo


class SparseAllreduce(NamedTuple):
    """Sums the selections of all workers on an axis: of a mesh, or an MPI communicator.

    Attributes:
      init: ``init(size, axis_size) -> state``. The state holds the same values on
        every worker; with a ``shard_axis``, on every worker of the same shard.
      reduce: ``reduce(coo, state, *, axis) -> (total, undelivered, state, info)``.
        ``total`` (a PaddedCOO, or ``f[size]`` where the result is dense) is the
        same bits on every worker, and finite where the selections are, unless it is
        dense. ``undelivered`` is an :class:`Undelivered`. Conservation: over the
        workers, the sum of ``coo`` equals ``total`` plus the sum of ``undelivered``.
      spec: what it was made as; checkpoints ask for it, and nothing else does.
      shard_axis: the mesh axes over which a vector is dealt out before anything is
        selected; none but with :func:`~sparse_collectives.allreduce.hierarchical`.
        Residual and selection are then those of a shard.
      scatter: ``scatter(f[n]) -> f[m]``: this worker's part of the sum over
        ``shard_axis``. Without such an axis the vector itself.
      gather: ``gather(f[m], n) -> f[n]``: the parts of all, the same on every worker.
      complete: whether all workers add what they have of an index that any of them
        selected. ``reduce`` then takes ``acc=``, the accumulator ``f[size]`` from which
        ``coo`` was selected, and ``undelivered`` says ``remainder`` what is left of it. It is
        the accumulators that are conserved. Without ``acc`` a worker gives nothing but ``coo``.
        Where all selections are empty nothing is delivered: so a step is skipped.
      choose: ``choose(coo, state, *, axis) -> (indices i32[K], state, info)``: the indices
        that ``total`` would have, unique but for padding, and the same on every worker. For
        who adds up something else at them, and doesn't need the values: fewer words. None
        where it would cost what ``reduce`` does.
      local_view: ``local_view(acc f[m], state, *, axis) -> f[s]``: what of its accumulator a worker
        selects from at this step; by default all of it.
      to_global: ``to_global(coo of s, m, state, *, axis) -> coo of m``: the indices of a selection
        from that, in the accumulator.
      keeps_others: whether a worker may be left with parts of what other workers sent:
        ``undelivered.others`` has entries. Its residual may then grow by more than its own
        gradient, and ``optax_ext`` takes no gradient of 2^103 (1e31) or more, so that no residual
        overflows.
    """

    init: Callable[..., State]
    reduce: Callable[..., tuple[PaddedCOO | jax.Array, Undelivered, State, "ReduceInfo"]]
    spec: Spec | None = None
    shard_axis: tuple[Hashable, ...] = ()
    scatter: Callable[[jax.Array], jax.Array] = _whole
    gather: Callable[[jax.Array, int], jax.Array] = _as_it_is
    complete: bool = False
    choose: Callable[..., tuple[jax.Array, State, "ReduceInfo"]] | None = None
    local_view: Callable[..., jax.Array] = _all_of_it
    to_global: Callable[..., PaddedCOO] = _where_it_is
    keeps_others: bool = True


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
        workers, divided by ``words``, is the occupancy of the messages. (In the paper's mode
        of ``ok_topk`` it is what the paper's messages would take.)
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
      spec: what it was made as; checkpoints ask for it, and nothing else does.
    """

    encode: Callable[..., "Encoded"]
    decode: Callable[..., Any]
    encode_dense: Callable[..., tuple[jax.Array, jax.Array]]
    decode_dense: Callable[..., jax.Array]
    exact: bool
    spec: Spec | None = None


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
