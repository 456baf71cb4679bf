"""The contracts of selectors, allreduces and codecs.

Each is a NamedTuple of pure functions that a factory makes, as in optax. All values
that change from step to step are in a state; no function prints or keeps global state.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from sparse_collectives._data import PaddedCOO, concatenate, empty
from sparse_collectives._spec import Spec

State = Any


class Communicator(Protocol):
    """An MPI communicator of mpi4py, whose ranks are the workers. It is not hashable."""

    def Get_rank(self) -> int:  # noqa: D102
        ...

    def Get_size(self) -> int:  # noqa: D102
        ...


AxisName = Hashable | tuple[Hashable, ...] | Communicator | tuple[Communicator, ...]


def _unchanged(x: Any, *others: Any, **options: Any) -> Any:
    del others, options
    return x


class Selector(NamedTuple):
    """Chooses which entries of a worker's accumulator are sent.

    Attributes:
      init: ``init(layout) -> state``, for a flat buffer with the layers of a
        :class:`sparse_collectives.Layout`; a number of entries means one layer.
      select: ``select(acc f[size], state) -> (PaddedCOO, state, SelectInfo)``.
        The values of the PaddedCOO are ``acc`` at its indices, unchanged.
      spec: the name and the arguments of its factory; only checkpoints use it.
      fork: ``fork(state, number i32[]) -> state``: the initial state for the layer with that number
        among several of one size, with a random stream of its own. By default, and for number 0, it
        returns ``state``.
    """

    init: Callable[..., State]
    select: Callable[..., tuple[PaddedCOO, State, "SelectInfo"]]
    spec: Spec | None = None
    fork: Callable[[State, jax.Array], State] = _unchanged


class SelectInfo(NamedTuple):
    """Statistics of one worker's selection.

    Attributes:
      selected: ``i32[]``, entries in the returned buffer.
      overflow: ``i32[]``, entries that passed the threshold and found no slot.
      threshold: ``f32[]``, the magnitude that was used as the threshold.
    """

    selected: jax.Array
    overflow: jax.Array
    threshold: jax.Array


class Undelivered(NamedTuple):
    """The values that a worker must keep in its residual after an allreduce.

    Attributes:
      slots: ``f[c]``, the part that the worker keeps of the entry in each slot of its selection: 0
        if it was delivered, and the whole value if not.
      others: a PaddedCOO of the other values that it keeps: partial sums that found no slot
        on the way, and the rounding errors of encoded partial sums. An index may occur more than
        once, and its values add up. It has 0 slots if there can be no such entries.
      rest_at_total: a PaddedCOO with unique indices, only from an allreduce with ``full_sums``:
        the value that replaces the accumulator at the indices of the total, whether this worker
        selected them or not. It is 0 or a rounding error. If it is given, ``slots`` is not used.
    """

    slots: jax.Array
    others: PaddedCOO
    rest_at_total: PaddedCOO | None = None

    @classmethod
    def of(
        cls, coo: PaddedCOO, slots: jax.Array | None = None, others: Sequence[PaddedCOO] = ()
    ) -> "Undelivered":
        """``slots f[c]`` of the selection ``coo``, by default nothing, and all ``others``."""
        slots = jnp.zeros_like(coo.values) if slots is None else slots
        none = empty(coo.size, 0, coo.values.dtype)
        return cls(slots, concatenate(others) if others else none)

    def residual(self, acc: jax.Array, coo: PaddedCOO) -> jax.Array:
        """The residual ``f[n]``: the rest of ``acc f[n]`` after its selection ``coo`` is exchanged.

        It has the shape of ``acc``, which may have leading axes of size 1, and is computed in place
        if ``acc`` may be overwritten. Cost: one scatter of c values, and one of the other entries
        if there can be any.
        """
        lead = (0,) * (acc.ndim - 1)
        if self.rest_at_total is None:
            indices, values = coo.indices, self.slots
        else:
            # ``acc`` still has the selected entries that are not in the total.
            indices, values = self.rest_at_total.indices, self.rest_at_total.values
        kept = acc.at[(*lead, indices)].set(values.astype(acc.dtype), mode="drop")
        if not self.others.capacity:
            return kept
        added = self.others.values.astype(acc.dtype)
        return kept.at[(*lead, self.others.indices)].add(added, mode="drop")


class SparseAllreduce(NamedTuple):
    """Sums the selections of all workers of a mesh axis or of an MPI communicator.

    Attributes:
      init: ``init(layout, axis_size) -> state``, for a flat buffer with the layers of a
        :class:`sparse_collectives.Layout`, of which most allreduces use only the size; a number of
        entries means one layer. The state holds the same values on every worker; with a
        ``shard_axis``, on every worker of the same shard.
      reduce: ``reduce(coo, state, *, axis) -> (total, undelivered, state, info)``.
        ``total`` is a PaddedCOO, or ``f[size]`` if the result is dense, with the same bits on
        every worker. A total that is not dense is finite at indices at which all selections are.
        ``undelivered`` is an :class:`Undelivered`. Conservation: over the workers, the sum of
        ``coo`` equals ``total`` plus the sum of ``undelivered``.
      spec: the name and the arguments of its factory; only checkpoints use it.
      shard_axis: the mesh axes over which a vector is scattered before the selection; only
        :func:`~sparse_collectives.allreduce.hierarchical` has any. Residual and selection then
        belong to a shard.
      scatter: ``scatter(f[n]) -> f[m]``: this worker's part of the sum over
        ``shard_axis``. Without such an axis it returns the vector.
      gather: ``gather(f[m], n) -> f[n]``: the parts of all workers, the same on every worker.
      full_sums: whether the total has full sums: all workers add their values at an index that any
        of them selected. ``reduce`` then takes ``acc=``, the accumulator ``f[size]`` from which
        ``coo`` was selected, ``undelivered.rest_at_total`` is the rest of it at the indices of the
        total, and conservation holds for the accumulators. Without ``acc`` a worker contributes
        only ``coo``. If all selections are empty, nothing is delivered: so a step is skipped.
      choose: ``choose(coo, state, *, axis) -> (indices i32[K], state, info)``: the indices
        that ``total`` would have, unique except for padding, and the same on every worker. It
        takes fewer words than ``reduce``, for callers that add up other values at these indices.
        None if it would cost as much as ``reduce``.
      local_view: ``local_view(acc f[m], state, *, axis) -> f[s]``: the part of its accumulator from
        which a worker selects at this step; by default all of it.
      to_global: ``to_global(coo of s, m, state, *, axis) -> coo of m``: a selection from that part,
        with its indices in the accumulator.
      may_keep_partial_sums: whether a worker may have to keep parts of entries of other workers, in
        ``undelivered.others``. Its residual may then grow by more than its own gradient, and
        ``optax_ext`` accepts only gradients below 2^103 (1e31), so that no residual overflows.
    """

    init: Callable[..., State]
    reduce: Callable[..., tuple[PaddedCOO | jax.Array, Undelivered, State, "ReduceInfo"]]
    spec: Spec | None = None
    shard_axis: tuple[Hashable, ...] = ()
    scatter: Callable[[jax.Array], jax.Array] = _unchanged
    gather: Callable[[jax.Array, int], jax.Array] = _unchanged
    full_sums: bool = False
    choose: Callable[..., tuple[jax.Array, State, "ReduceInfo"]] | None = None
    local_view: Callable[..., jax.Array] = _unchanged
    to_global: Callable[..., PaddedCOO] = _unchanged
    may_keep_partial_sums: bool = True


class ReduceInfo(NamedTuple):
    """Statistics of one call of an allreduce.

    Attributes:
      delivered: ``i32[]``, entries in the total; equal on all workers.
      overflow: ``i32[]``, entries of this worker that found no slot on the way.
      threshold: ``f32[]``, the global threshold; equal on all workers.
      words: ``f32[]``, 4-byte words each worker received, padding included; equal on all workers.
      useful: ``f32[]``, words that this worker sent, without padding: a message
        with e entries in c slots counts e / c of its words; dense runs, counts and
        histograms count in full. Every sent word is received, so the mean over the
        workers, divided by ``words``, is the occupancy of the messages. (With ``paper``
        in ``ok_topk`` it is the words that the paper's messages would take.)
    """

    delivered: jax.Array
    overflow: jax.Array
    threshold: jax.Array
    words: jax.Array
    useful: jax.Array

    @classmethod
    def of(
        cls,
        total: PaddedCOO | jax.Array,
        words: jax.Array | float,
        *,
        useful: jax.Array | float | None = None,
        overflow: jax.Array | int = 0,
        threshold: jax.Array | float = 0.0,
        delivered: jax.Array | None = None,
    ) -> "ReduceInfo":
        """The info of an allreduce with this total; by default all of its words are useful.

        ``delivered`` is by default the number of entries of ``total``, or of nonzero ones if it is
        dense.
        """
        received = jnp.float32(words)
        if delivered is None and isinstance(total, PaddedCOO):
            delivered = total.count()
        elif delivered is None:
            delivered = jnp.sum(total != 0, dtype=jnp.int32)
        return cls(
            delivered=delivered,
            overflow=jnp.asarray(overflow, jnp.int32),
            threshold=jnp.asarray(threshold, jnp.float32),
            words=received,
            useful=received if useful is None else jnp.float32(useful),
        )


class Codec(NamedTuple):
    """Encodes value-index pairs, and dense runs of values, for an exchange.

    A decoded message has the entries of the encoded one, in their order. Values may
    be rounded, and padding may lie in between. The codec reports rounding errors and
    entries that were left out to the sender, so that nothing is lost.

    Attributes:
      encode: ``encode(PaddedCOO[..., c], seed) -> Encoded``. ``seed`` is ``u32[]``
        and determines the random rounding, if there is any.
      decode: ``decode(i32[..., w], size, dtype) -> PaddedCOO[..., d]``; d >= c.
      encode_dense: ``encode_dense(f[..., m], seed) -> (i32[..., w], f[..., m])``:
        the message, and the values minus the decoded values.
      decode_dense: ``decode_dense(i32[..., w], m, dtype) -> f[..., m]``.
      exact: whether every message is decoded to the bits that were encoded; then
        ``sent`` is true for all entries and ``error`` is 0.
      spec: the name and the arguments of its factory; only checkpoints use it.
    """

    encode: Callable[..., "Encoded"]
    decode: Callable[..., Any]
    encode_dense: Callable[..., tuple[jax.Array, jax.Array]]
    decode_dense: Callable[..., jax.Array]
    exact: bool
    spec: Spec | None = None


class Encoded(NamedTuple):
    """A message, and the parts of its entries that the receiver does not get.

    Attributes:
      message: ``i32[..., w]``.
      sent: ``bool[..., c]``, the entries that are in the message; false for padding.
      error: ``f[..., c]``, the value minus the decoded value if ``sent``, else 0.
    """

    message: jax.Array
    sent: jax.Array
    error: jax.Array
