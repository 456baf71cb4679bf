"""SSAR_Recursive_double of SparCML: partners exchange all that they have."""

import functools

import jax
import jax.numpy as jnp

from sparse_collectives import (
    _data,
    _hash,
    _validation,
    _varying,
    transport,
    wire,
)
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import _frame, _replicas, _stream
from sparse_collectives.allreduce._parts._stream import Stream
from sparse_collectives.transport import _dispatch


def ssar_recursive_double(
    *, capacity: int | None = None, codec: Codec | None = None
) -> SparseAllreduce:
    r"""The sparse allreduce for small data of SparCML (section 5.3.1).

    In round t workers at distance 2^t exchange the sums that they have so far and add
    them, so that after log2(P) rounds every worker has the sum of all. With Q, the
    largest power of two up to P, the last P - Q workers first send their selections to the
    first ones and receive the result at the end (appendix A).

    Messages grow with the union: round t has ``2^t c`` slots (up to twice that if P is not a power
    of two), c being the slots of the selection, or ``capacity`` if that is less. If so many pairs
    would take more words than a dense vector, the message is dense, and so are all that follow
    (section 5.1). One of the workers that hold a sum keeps the entries that find no slot and the
    losses of the codec; which entries wait changes from step to step.

    Cost in the alpha-beta model, in words of ``raw``: ``min(2^(t+1) c, n)`` words received
    in round t, ``2 c (P-1)`` in all if none is dense, ``2 capacity log2(P)`` with a bound;
    log2(P) latencies. If P is not a power of two, there are two more messages and latencies,
    and the last message is as long as the total.

    Under ``shard_map(check_vma=True)`` the total has to be typed as replicated. This takes an
    allgather of its slots in Q parts: ``L (P-1)/Q`` more words for a total of L words, but no
    message at the end if P is not a power of two. With ``check_vma=False`` nothing is added.

    Args:
      capacity: the most slots of a sparse message and of a sparse total. By default there is
        room for everything.
      codec: encoding of the messages, exact by default.

    Returns:
      A :class:`SparseAllreduce` with a :class:`StepState`; its total is a PaddedCOO
      with ``P c`` or ``capacity`` slots, or ``f[n]`` if that takes fewer words.

    Raises:
      ValueError: an argument out of its range.
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Renggli et al., `SparCML <https://doi.org/10.1145/3295500.3356222>`_, SC 2019.
    """
    if capacity is not None:
        capacity = _validation.check_positive_int("capacity", capacity)
    codec = wire.raw() if codec is None else codec

    @_frame.counted(exact=codec.exact, float64=True)
    def reduce(coo: PaddedCOO, count: jax.Array, *, axis: AxisName):
        workers, me = transport.axis_size(axis), transport.axis_index(axis)
        members = 1 << (workers.bit_length() - 1)
        surplus = workers - members
        most_slots = coo.size if capacity is None else min(capacity, coo.size)
        kept = []
        words, useful = 0.0, jnp.zeros((), jnp.float32)

        def one_of(group, entries):
            """The entries that this worker keeps, of those that ``group`` workers hold."""
            # By index, so that the rest of an index adds up in one residual.
            mine = me % group == entries.indices % group
            return _data.only_where((me < members) & mine, entries)

        def bound(stream, stage, group):
            """The entries that have a slot, and the number of entries without one."""
            if not isinstance(stream, PaddedCOO):
                return stream, jnp.zeros((), jnp.int32)
            turn = _hash.turn(count, stage)
            entries, left = _compaction.bounded(stream, most_slots, turn)
            left = one_of(group, left) if group else left
            kept.extend([left] if left.capacity else [])
            return _stream.shorter(entries, codec), left.count()

        def encode(stream, stage, sender, keeper):
            """The message, and the stream that each receiver decodes from it."""
            sent = _stream.encode(stream, codec, _hash.seed(count, stage, sender))
            if codec.exact:
                return sent, stream
            kept.append(keeper(sent.lost))
            return sent, _stream.decode(sent.message, stream, codec)

        def send(message, like, pairs):
            """The received stream; it is empty on workers that are no targets."""
            received = _stream.decode(transport.ppermute(message, axis, pairs), like, codec)
            targets = jnp.asarray([target for _, target in pairs], jnp.int32)
            return _stream.only_where(jnp.any(targets == me), received)

        stream, overflow = bound(coo, 0, None)

        # Appendix A: the surplus workers hand over their selections.
        fold = [(members + worker, worker) for worker in range(surplus)]
        if surplus:
            own_part = functools.partial(_data.only_where, me >= members)
            sent, _ = encode(stream, 0, me, own_part)
            words += _dispatch.words_of_ppermute(sent.message.size, workers, fold)
            useful += jnp.where(me >= members, sent.useful, 0.0)
            other = send(sent.message, stream, fold)
            stream = _stream.add(stream, other, 2 * coo.capacity)
            stream, left = bound(stream, 1, 1)
            overflow += left

        # Round t: the two halves of each group of 2^(t+1) workers exchange their sums.
        for stage in range(members.bit_length() - 1):
            half = 1 << stage
            pairs = [(worker, worker ^ half) for worker in range(members)]
            # All workers of a half hold the same sum and send the same bits.
            part = functools.partial(one_of, half)
            sent, own = encode(stream, stage + 1, me // half, part)
            words += _dispatch.words_of_ppermute(sent.message.size, workers, pairs)
            useful += jnp.where(me < members, sent.useful, 0.0)
            other = send(sent.message, stream, pairs)
            # In the order of the workers, so that both halves have the same bits.
            is_lower = (me & half) == 0
            lower, upper = _choose(is_lower, own, other), _choose(is_lower, other, own)
            sources = 2 * half + min(surplus, 2 * half)
            stream = _stream.add(lower, upper, sources * coo.capacity)
            stream, left = bound(stream, stage + 2, 2 * half)
            overflow += left

        # Appendix A: the surplus workers get the result.
        total = stream
        if _varying.checks_varying(axis):
            shared, filled = _replicas.shared_words(total, members, workers)
            words += shared
            total = _replicas.share(total, axis, members)
            useful += filled
        elif surplus:
            part = functools.partial(one_of, members)
            sent, own = encode(total, members.bit_length(), jnp.zeros_like(me), part)
            back = [(target, source) for source, target in fold]
            words += _dispatch.words_of_ppermute(sent.message.size, workers, back)
            useful += jnp.where(me < surplus, sent.useful, 0.0)
            total = _choose(me < members, own, send(sent.message, total, back))
        # All have the same bits, which the equations of a butterfly do not show.
        total = jax.tree.map(lambda x: _varying.to_invarying(x, axis), total)

        undelivered = Undelivered.of(coo, others=kept)
        info = ReduceInfo.of(total, words, useful=useful, overflow=overflow)
        return total, undelivered, info

    spec = Spec.of("ssar_recursive_double", capacity=capacity, codec=codec)
    partial = capacity is not None or not codec.exact
    return SparseAllreduce(_frame.init, reduce, spec, may_keep_partial_sums=partial)


def _choose(condition: jax.Array, chosen: Stream, otherwise: Stream) -> Stream:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, otherwise)
