"""The ring allreduce with sparse blocks that grow on their way."""

import math

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, _validation, transport, wire
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce, Undelivered
from sparse_collectives.allreduce._parts import (
    _equal_regions,
    _frame,
    _slots,
    _stream,
)
from sparse_collectives.transport import _dispatch


def ring_sparse(
    *, slack: float = 1.25, fill: float | None = None, codec: Codec | None = None
) -> SparseAllreduce:
    r"""A ring reduce-scatter and an allgather of sparse blocks.

    It is the sparse counterpart of the ring that dense allreduces use (compared in section
    8.1 of SparCML). The sum of a region starts as one worker's block and passes P - 1
    workers, each of which merges its own block into it; the last one owns the region.

    A block has ``s = ceil(slack c / P)`` slots, c being the slots of the selection,
    and the sum of m blocks has as many as are expected: ``g_m = ceil(slack K_m / P)``, K_m
    being the union of m selections. An entry that finds no slot in its worker's block
    stays with its worker; a partial sum that finds no slot on the way stays with the worker
    that drops it. Which entries wait changes from step to step. If the slots of a sum would take
    more words than all values of its region, it is sent dense from there on (section 5.1).

    Cost in the alpha-beta model, in words of ``raw``: ``2 (g_1 + ... + g_(P-1))`` words
    received in P - 1 messages, then ``2 g_P (P-1)`` in an allgather. Each worker communicates
    with its neighbors only, which suits links that form a ring; the program grows with
    P, so it is for a moderate number of workers.

    Args:
      slack: slots as a multiple of the expected number, at least 1; from P on, or with
        ``math.inf``, a block has room for everything.
      fill: the expected union of the selections of all workers as a multiple of c, at
        least 1, or ``math.inf`` for slots for everything. By default the union of
        uniformly random indices, ``n (1 - (1 - c/n)^P)``.
      codec: encoding of the messages, exact by default.

    Returns:
      A :class:`SparseAllreduce` with a :class:`StepState`; its total is a PaddedCOO
      with ``P g_P`` slots, or ``f[n]`` if that takes fewer words. With
      ``slack=math.inf, fill=math.inf`` everything is delivered, whatever the indices are.

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
        neighbours = [(source, (source + 1) % workers) for source in range(workers)]
        blocks = _equal_regions.split(coo, regions, capacity, _hash.turn(count, 0))
        overflow = coo.count() - jnp.sum(blocks.sent, dtype=jnp.int32)
        unsent = jnp.where(blocks.sent, jnp.zeros_like(coo.values), coo.values)
        kept = []
        words, useful = 0.0, []

        def block(region):
            return PaddedCOO(blocks.coo.values[region], blocks.coo.indices[region], regions.width)

        def encode(partial, stage, region, receivers):
            sent = _stream.encode(partial, codec, _hash.seed(count, stage, me))
            useful.append(receivers * sent.useful)
            if not codec.exact:
                kept.append(_equal_regions.from_region(sent.lost, regions, region))
            return sent.message

        # The reduce-scatter: region r starts at worker r + 1 and ends at worker r.
        region = (me - 1) % workers
        partial = _stream.shorter(block(region), codec)
        for stage in range(workers - 1):
            message = encode(partial, stage, region, 1)
            words += _dispatch.words_of_ppermute(message.size, workers, neighbours)
            received = transport.ppermute(message, axis, neighbours)
            region = (region - 1) % workers
            received = _stream.decode(received, partial, codec)
            most = min((stage + 2) * capacity, regions.width)
            partial = _stream.add(received, block(region), most)
            if isinstance(partial, PaddedCOO):
                slots = _slots.union_slots(coo.capacity, regions, stage + 2, slack, fill)
                partial, left = _compaction.bounded(partial, slots, _hash.turn(count, stage + 1))
                if left.capacity:
                    kept.append(_equal_regions.from_region(left, regions, region))
                    overflow = overflow + left.count()
                partial = _stream.shorter(partial, codec)

        # The allgather.
        message = encode(partial, workers - 1, region, workers - 1)
        words += _dispatch.words_of_all_gather(message.size, workers)
        dense = not isinstance(partial, PaddedCOO)
        total = _equal_regions.gather(message, regions, dtype, axis=axis, codec=codec, dense=dense)

        filled = sum(useful, jnp.float32(0))
        info = ReduceInfo.of(total, words, useful=filled, overflow=overflow)
        undelivered = Undelivered.of(coo, unsent, kept)
        return total, undelivered, info

    return SparseAllreduce(
        _frame.init, reduce, spec=Spec.of("ring_sparse", slack=slack, fill=fill, codec=codec)
    )
