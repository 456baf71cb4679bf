"""gTop-k: a reduction tree that keeps k entries at each level, and a broadcast."""

import jax
import jax.numpy as jnp

from sparse_collectives import _data, _hash, _validation, transport, wire
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _kth_magnitude
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import _frame, _merge, _messages, _replicas
from sparse_collectives.transport import _dispatch


def gtopk(density: float, *, codec: Codec | None = None) -> SparseAllreduce:
    r"""The sparse allreduce of gTop-k, for any number of workers.

    The workers form a binomial tree with levels l = 0, 1, ... A worker w with
    w mod 2^(l+1) = 2^l sends its selection to worker w - 2^l. That worker adds it to its
    own and continues with the k largest of the sum:

    .. math:: (a, b) \mapsto Topk(a + b), \quad k = \max(1, round(density \cdot n))

    Worker 0 ends with k entries and broadcasts them. The result is not the top k of
    the sum of all selections: an entry that is small in every pair is dropped even
    if the sum of all pairs is large.

    A worker keeps the entries that it drops, as partial sums: these are entries of its
    ``undelivered``, at indices that it may not have selected, and an index may occur
    several times. It keeps nothing of the entries that it sent. So nothing is lost: an
    entry waits in the residual of the worker that dropped it.

    Cost: as a mean over the workers 2 k (P-1)/P words received in the reduction and as many in the
    broadcast, plus about k log2(P) / P; this is ``info.words``. The workers do not share it evenly:
    worker 0 receives 2 k ceil(log2 P) in the reduction, one message after the other, as in the
    paper, whose bound for both parts is 4 k log2 P words. The broadcast (:mod:`._replicas`) takes 4
    k at most on any worker, and the paper's takes 2 k log2 P. Latency: 2 ceil(log2 P) messages and
    an allgather. Memory: ``undelivered`` has k slots for each level.

    Args:
      density: k / n of the result and of each message, in (0, 1]. If a selection has
        more than k entries, the k largest take part.
      codec: encoding of the messages, exact by default. The worker that encodes keeps
        the rounding errors of a lossy codec and the entries that it leaves out.

    Returns:
      A :class:`SparseAllreduce`; its total is an ascending PaddedCOO (with an exact codec) of at
      most k slots. ``info.threshold`` is the smallest magnitude in it, ``info.overflow`` counts the
      entries that the codec left out of the message of this worker.

    Raises:
      ValueError: a density outside (0, 1].
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Shi et al., `A Distributed Synchronous SGD Algorithm with Global Top-k
      Sparsification for Low Bandwidth Networks <https://arxiv.org/abs/1901.04359>`_,
      ICDCS 2019; Table 1 of `Ok-Topk <https://doi.org/10.1145/3503221.3508399>`_.
    """
    density = _validation.check_density(density)
    codec = wire.raw() if codec is None else codec

    @_frame.sums_in_range(exact=codec.exact)
    def reduce(coo: PaddedCOO, state: _frame.StepState, *, axis: AxisName):
        workers = transport.axis_size(axis)
        me = transport.axis_index(axis)
        k = _validation.count_from_density(density, coo.size)
        levels = (workers - 1).bit_length()
        words, useful = 0.0, jnp.zeros((), jnp.float32)
        overflow = jnp.zeros((), jnp.int32)

        own, kept = _kth_magnitude.keep_largest(coo, k)
        for level in range(levels):
            distance = 1 << level
            pairs = [(w, w - distance) for w in range(distance, workers, 2 * distance)]
            sends = me % (2 * distance) == distance
            receives = (me % (2 * distance) == 0) & (me + distance < workers)
            encoded = codec.encode(own, _hash.seed(state.count, level, me))
            with jax.named_scope("gtopk/reduce"):
                message = transport.ppermute(encoded.message, axis, pairs)
            words += _dispatch.words_of_ppermute(encoded.message.size, workers, pairs)
            entries = jnp.sum(encoded.sent, dtype=jnp.int32)
            filled = _messages.useful_words(encoded.message.size, entries, own.capacity)
            useful += jnp.where(sends, filled, 0.0)
            # Workers that are not targets receive zeros, which would be entries of index 0.
            received = codec.decode(message, coo.size, coo.values.dtype)
            received = _data.only_where(receives, received)
            if not codec.exact:
                kept.append(_data.only_where(sends, _messages.kept_by_sender(own, encoded)))
                overflow += jnp.where(sends, _messages.unsent_count(own, encoded), 0)
            # A sender is done: it continues with nothing, and drops nothing.
            merged = _sum(_data.only_where(~sends, own), received)
            own, dropped = _kth_magnitude.keep_largest(merged, k)
            kept += dropped

        if workers == 1:
            total, _, _ = _replicas.of_one_worker(own, axis)
        else:
            encoded = codec.encode(own, _hash.seed(state.count, levels, 0))
            with jax.named_scope("gtopk/broadcast"):
                message = _replicas.from_first(encoded.message, axis)
            broadcast = _replicas.words_from_first(encoded.message.size, workers)
            words += broadcast
            total = codec.decode(message, coo.size, coo.values.dtype)
            # Many workers pass it on, so this is the mean over the workers.
            useful += _messages.useful_words(broadcast, total.count(), own.capacity)
            if not codec.exact:
                kept.append(_data.only_where(me == 0, _messages.kept_by_sender(own, encoded)))
                overflow += jnp.where(me == 0, _messages.unsent_count(own, encoded), 0)

        threshold = _kth_magnitude.smallest_magnitude(total)
        info = ReduceInfo.of(total, words, useful=useful, overflow=overflow, threshold=threshold)
        undelivered = Undelivered.of(coo, others=kept)
        return total, undelivered, _frame.StepState(state.count + 1), info

    return SparseAllreduce(_frame.init, reduce, spec=Spec.of("gtopk", density=density, codec=codec))


def _sum(own: PaddedCOO, received: PaddedCOO) -> PaddedCOO:
    """The sum of both, ascending, with twice the slots of ``own``."""
    rows = [PaddedCOO(x.values[None], x.indices[None], x.size) for x in (own, received)]
    merged = _merge.reduce_blocks(rows, own.size, own.values.dtype)
    # A decoded message may have more slots than entries.
    slots = min(merged.capacity, 2 * own.capacity)
    return PaddedCOO(merged.values[:slots], merged.indices[:slots], own.size)
