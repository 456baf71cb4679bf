"""SSAR_Split_allgather of SparCML: each region is summed by its owner."""

import math

import jax
import jax.numpy as jnp

from sparse_collectives import _data, _hash, _validation, transport, wire
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _bitset, _compaction
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


def ssar_split_allgather(
    *, slack: float = 1.25, fill: float | None = None, codec: Codec | None = None
) -> SparseAllreduce:
    r"""The sparse allreduce for large data of SparCML (section 5.3.2).

    The index space is cut into P regions of equal width. Each worker sends every
    owner the entries of its region (one all_to_all), the owner adds them up, and an
    allgather sends the sums to all workers.

    Messages have a fixed number of slots: ``s = ceil(slack c / P)`` for a block, c
    being the slots of the selection, and ``g = ceil(slack K / P)`` for the allgather,
    K being the expected size of the union. Entries that find no slot stay with the workers
    that contributed, and which entries wait changes from step to step. If so many pairs
    would take more words than all values of a region, the values are gathered (section 5.1).

    Cost in the alpha-beta model, in words of ``raw``: ``2 s (P-1) + 2 g (P-1)`` words
    received, so ``slack (2 c + 2 K) (P-1)/P``; P - 1 + log2(P) latencies.

    Args:
      slack: slots of a message as a multiple of its expected share, at least 1; from P
        on, or with ``math.inf``, a block has room for everything.
      fill: the expected union of all selections as a multiple of c, at least 1: 1 if the workers
        select the same indices, P if they have none in common, or ``math.inf`` for slots for
        everything. By default the union of uniformly random indices, ``n (1 - (1 - c/n)^P)``.
      codec: encoding of the messages, exact by default.

    Returns:
      A :class:`SparseAllreduce` with a :class:`StepState`; its total is a PaddedCOO
      with ``P g`` slots, or ``f[n]`` if that takes fewer words.
      ``ssar_split_allgather(slack=math.inf, fill=math.inf)`` delivers everything, whatever
      the indices are.

    Raises:
      ValueError: an argument out of its range.
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Renggli et al., `SparCML <https://doi.org/10.1145/3295500.3356222>`_, SC 2019.
    """
    slack = _validation.check_number("slack", slack, 1.0, math.inf)
    fill = None if fill is None else _validation.check_number("fill", fill, 1.0, math.inf)
    codec = wire.raw() if codec is None else codec

    @_frame.counted(exact=codec.exact, float64=True)
    def reduce(coo: PaddedCOO, count: jax.Array, *, axis: AxisName):
        workers, me = transport.axis_size(axis), transport.axis_index(axis)
        dtype = coo.values.dtype
        regions = _slots.make_regions(coo.size, workers)
        capacity = _slots.block_slots(coo.capacity, regions, slack)
        slots = _slots.union_slots(coo.capacity, regions, workers, slack, fill)
        turn = _hash.turn(count, 1)

        split = _equal_regions.to_owners(
            coo, regions, capacity, axis=axis, codec=codec, count=count
        )
        sums = split.sums

        # The allgather: of pairs, or dense if that is shorter.
        gather_slots = min(slots, sums.capacity)
        whole = _stream.goes_dense(codec, gather_slots, regions.width, dtype)
        mine = sums.to_dense() if whole else _compaction.bounded(sums, slots, turn)[0]
        outgoing = _stream.encode(mine, codec, _hash.seed(count, 1, me))
        delivered = split.sent
        total = _equal_regions.gather(
            outgoing.message, regions, dtype, axis=axis, codec=codec, dense=whole
        )
        if isinstance(total, PaddedCOO) and (gather_slots < sums.capacity or not codec.exact):
            # Entries that were sent and are in the total are delivered, the others are kept.
            in_total = _bitset.insert(_bitset.empty(coo.size), total.indices, coo.size)
            delivered = delivered & _bitset.contains(in_total, coo.indices)
        others = []
        if not codec.exact:
            # Sums that the codec left out are not in the total: their parts are kept in the slots.
            errors = _data.only_where(outgoing.sent, outgoing.lost)
            others = [_equal_regions.from_region(errors, regions, me)]
        kept = jnp.where(delivered, split.error, coo.values)
        undelivered = Undelivered.of(coo, kept, others)

        gather_words = _dispatch.words_of_all_gather(outgoing.message.size, workers)
        useful = outgoing.useful * (gather_words / max(1, outgoing.message.size))
        words = _messages.words_in_all(
            split.words, _messages.Words(jnp.float32(gather_words), useful)
        )
        overflow = coo.count() - jnp.sum(delivered, dtype=jnp.int32)
        info = ReduceInfo.of(total, words.received, useful=words.useful, overflow=overflow)
        return total, undelivered, info

    spec, partial = (
        Spec.of("ssar_split_allgather", slack=slack, fill=fill, codec=codec),
        not codec.exact,
    )
    return SparseAllreduce(_frame.init, reduce, spec, may_keep_partial_sums=partial)
