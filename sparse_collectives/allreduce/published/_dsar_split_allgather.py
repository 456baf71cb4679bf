"""DSAR_Split_allgather of SparCML: the sums are gathered sparse or dense, as is shorter."""

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, _validation, transport, wire
from sparse_collectives._data import PaddedCOO
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import (
    _equal_regions,
    _frame,
    _messages,
    _slots,
    _stream,
)
from sparse_collectives.transport import _dispatch


def dsar_split_allgather(
    *,
    slack: float = 1.25,
    codec: Codec | None = None,
    dense_codec: Codec | None = None,
) -> SparseAllreduce:
    r"""The dynamic sparse allreduce of SparCML (section 5.3.3).

    The split is the same as in :func:`ssar_split_allgather`. Then the owners send their sums to all
    workers: as pairs if all unions are small, and as dense regions if one is not. The switch is at
    the count for which both messages have the same number of words: with 4-byte values and indices
    ``delta = n / 2`` (``n isize / (c + isize)`` in section 5.1), and with other codecs according to
    their messages. It is decided at run time from the counts of all workers, so all decide the
    same, and no entry that reached its owner is left out.

    Deviation: a message has a fixed number of slots, so one sparse form would always
    cost as much as the dense one. There are several, each with half the slots of the one
    before, and the shortest that fits is taken: up to three.

    Cost in the alpha-beta model, in words of ``raw``: ``2 slack c (P-1)/P`` words
    received in the split and P - 1 for the counts; then ``n (P-1)/P`` in the dense
    form, or ``n (P-1)/P / 2^j`` in the sparse form j; P - 1 + 2 log2(P) latencies.

    Args:
      slack: slots of a block of the split as a multiple of its share c / P, at least
        1; from P on, or with ``math.inf``, there is room for everything. Entries that find
        no slot stay with their worker, and which ones changes from step to step.
      codec: encoding of value-index pairs, exact by default.
      dense_codec: encoding of dense regions, by default ``codec``. An owner keeps
        the rounding errors of its sums.

    Returns:
      A :class:`SparseAllreduce` with a :class:`StepState`; its total is ``f[n]``.

    Raises:
      ValueError: an argument out of its range.
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Renggli et al., `SparCML <https://doi.org/10.1145/3295500.3356222>`_, SC 2019.
    """
    slack = _validation.check_number("slack", slack, 1.0, math.inf)
    codec = wire.raw() if codec is None else codec
    dense_codec = codec if dense_codec is None else dense_codec
    exact = codec.exact and dense_codec.exact

    @_frame.counted(exact=exact, float64=True, dense=True)
    def reduce(coo: PaddedCOO, count: jax.Array, *, axis: AxisName):
        workers, me = transport.axis_size(axis), transport.axis_index(axis)
        dtype = coo.values.dtype
        regions = _slots.make_regions(coo.size, workers)
        width = regions.width
        capacity = _slots.block_slots(coo.capacity, regions, slack)

        split = _equal_regions.to_owners(
            coo, regions, capacity, axis=axis, codec=codec, count=count
        )
        reduced = split.sums

        nothing = jnp.zeros((0,), dtype)
        gather = functools.partial(_equal_regions.gather, regions=regions, dtype=dtype, axis=axis)

        def sparse(slots):
            def run():
                mine = PaddedCOO(reduced.values[:slots], reduced.indices[:slots], width)
                outgoing = codec.encode(mine, _hash.seed(count, 1, me))
                total = cast(PaddedCOO, gather(outgoing.message, codec=codec, dense=False))
                lost = nothing if exact else _messages.kept_by_sender(mine, outgoing).to_dense()
                entries = jnp.sum(outgoing.sent, dtype=jnp.int32)
                return total.to_dense(), total.count(), entries, lost

            return run

        def dense():
            message, lost = dense_codec.encode_dense(reduced.to_dense(), _hash.seed(count, 1, me))
            total = cast(jax.Array, gather(message, codec=dense_codec, dense=True))
            delivered = jnp.sum(counts, dtype=jnp.int32)
            return total, delivered, reduced.count(), nothing if exact else lost

        # The shortest form that has room for the sums of every owner.
        counts = transport.all_gather(reduced.count(), axis)
        dense_words = _messages.dense_words(dense_codec, width, dtype)

        def words_of(slots):
            return _messages.pair_words(codec, slots, width, dtype)

        ladder = _slots.sparse_forms(
            reduced.capacity,
            coo.capacity // workers,
            lambda slots: words_of(slots) <= dense_words,
        )
        forms = [sparse(slots) for slots in ladder]
        form_words = [words_of(slots) for slots in ladder]
        if not ladder or ladder[-1] < reduced.capacity:
            forms.append(dense)
            form_words.append(dense_words)
        form = jnp.sum(jnp.max(counts) > jnp.asarray(ladder, jnp.int32), dtype=jnp.int32)
        with jax.named_scope("dsar/form"):
            chosen = lax.switch(form, forms) if len(forms) > 1 else forms[0]()
        total, delivered, entries, lost = chosen

        others = []
        if not exact:
            others = [_equal_regions.from_region(_stream.entries_of(lost), regions, me)]
        undelivered = Undelivered.of(coo, jnp.where(split.sent, split.error, coo.values), others)

        count_words = _dispatch.words_of_all_gather(1, workers)
        gather_words = [_dispatch.words_of_all_gather(words, workers) for words in form_words]
        gather_words = jnp.asarray(gather_words, jnp.float32)[form]
        # The dense form has no padding.
        shares = [entries / slots for slots in ladder] + [1.0] * (len(forms) - len(ladder))
        useful = (
            split.words.useful
            + count_words
            + gather_words * jnp.stack([jnp.float32(share) for share in shares])[form]
        )
        info = ReduceInfo.of(
            total,
            gather_words + split.words.received + jnp.float32(count_words),
            useful=useful,
            overflow=coo.count() - jnp.sum(split.sent, dtype=jnp.int32),
            delivered=delivered,
        )
        return total, undelivered, info

    codecs = {"codec": codec, "dense_codec": dense_codec}
    spec = Spec.of("dsar_split_allgather", slack=slack, **codecs)
    return SparseAllreduce(_frame.init, reduce, spec, may_keep_partial_sums=not exact)
