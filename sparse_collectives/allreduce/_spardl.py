"""SparDL: a reduce-scatter of sparse blocks that keep their length, and an allgather."""

import jax
import jax.numpy as jnp

from sparse_collectives import _data, _hash, _validation, transport, wire
from sparse_collectives._data import PaddedCOO
from sparse_collectives._sparse_ops import _kth_magnitude
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce
from sparse_collectives.allreduce._parts import (
    _equal_regions,
    _frame,
    _hashed,
    _merge,
    _messages,
    _slots,
)
from sparse_collectives.transport import _dispatch


def spardl(density: float, *, codec: Codec | None = None) -> SparseAllreduce:
    r"""The sparse allreduce of SparDL, for any number of workers.

    The indices are divided into P blocks, one for each worker. In the Spar-Reduce-Scatter
    (section III.A) a worker sends its entries of the blocks of others in ceil(log2 P)
    messages, each time about half of the blocks, and adds the received entries to the blocks
    that it still has. A block is cut to its k / P largest sums just before it is sent:

    .. math:: b \mapsto Topk(b), \quad \lceil k / P \rceil \text{ entries}, \quad
        k = \max(1, round(density \cdot n))

    Therefore no message grows on the way. In the end each worker has the sum of its own block and
    cuts it as well, and all workers gather the blocks. The result is not the top k of the sum of
    all selections: an entry that is small in each partial sum is cut off, even if their sum
    is large.

    Entries that are cut off stay (global residual collection, section III.B). If the index is in
    the total, the worker that cut the entry off keeps it, as a partial sum, in ``others`` of its
    ``undelivered``. If it is not, each worker keeps its selected value unchanged.

    Deviations: the paper's blocks are runs of indices, and if the large entries lie in
    one layer, most of them are cut off. Here every worker owns one of each P consecutive
    indices, by a hash (:mod:`._hashed`), so that the k / P largest of the blocks are
    nearly the k largest of all. If P does not divide k, each block has one more slot. The
    paper's teams, which reduce the number of messages, are not implemented.

    Cost: ``2 ceil(k/P) (P-1)`` words received in the reduction and as many in the
    allgather: ``4 k (P-1)/P`` if P divides k, whatever the data and the same for each worker.
    Latency: ceil(log2 P) messages and an allgather. Compute: about 10 passes over the
    entries of each message. Memory: ``undelivered`` has about 2 k slots in addition.

    Args:
      density: k / n of the result, in (0, 1].
      codec: encoding of the messages, exact by default. The worker that encodes keeps the
        rounding errors of a lossy codec and the entries that it leaves out. A single worker's
        selection is not encoded.

    Returns:
      A :class:`SparseAllreduce` with a :class:`StepState`; its total is a PaddedCOO of
      ``P ceil(k/P)`` slots, indices in no order. ``info.threshold`` is the smallest magnitude in
      it. ``info.overflow`` counts entries that found no slot in their block before the first
      message (a block has room for four standard deviations), and entries that the codec left out.

    Raises:
      ValueError: a density outside (0, 1].
      ValueError: at ``reduce``, an axis that is not bound.

    References:
      Zhao et al., `SparDL: Distributed Deep Learning Training with Efficient Sparse
      Communication <https://arxiv.org/abs/2304.00737>`_, ICDE 2024.
    """
    density = _validation.check_density(density)
    chosen_codec = wire.raw() if codec is None else codec

    @_frame.sums_in_range(exact=chosen_codec.exact)
    def reduce(
        coo: PaddedCOO, state: _frame.StepState, *, axis: AxisName, indices_alone: bool = False
    ):
        workers = transport.axis_size(axis)
        me = transport.axis_index(axis)
        dtype = coo.values.dtype
        k = _validation.count_from_density(density, coo.size)
        plan = _slots.make_halving(coo.size, k, workers, coo.capacity)
        # A single worker sends nothing, so nothing has to be encoded.
        codec = chosen_codec if workers > 1 else wire.raw()
        words, useful = 0.0, jnp.zeros((), jnp.float32)
        kept = []

        def owners(rows, first):
            """The owner of each row, if the first row is the block of worker ``first``."""
            return (first + jnp.arange(rows.indices.shape[0], dtype=jnp.int32)) % workers

        def at_indices(parts):
            """The entries of all parts at their indices; a part is rows and their owners."""
            owner = jnp.concatenate([jnp.repeat(each, rows.capacity) for rows, each in parts])
            entries = _data.concatenate([rows for rows, _ in parts])
            return _hashed.from_rows(entries, coo.size, workers, owner, state.count)

        def encode(rows, first, slots, stage, codec=codec):
            """Cuts and encodes the blocks of ``first`` and later workers; the rest is kept."""
            owner = owners(rows, first)
            largest, cut_off = jax.vmap(lambda row: _kth_magnitude.keep_largest(row, slots))(rows)
            kept.extend((others, owner) for others in cut_off)
            encoded = codec.encode(largest, _hash.seed(state.count, stage, me))
            if not codec.exact:
                kept.append((_messages.kept_by_sender(largest, encoded), owner))
            entries = jnp.sum(encoded.sent, dtype=jnp.int32)
            filled = _messages.useful_words(encoded.message.size, entries, largest.indices.size)
            return encoded.message, filled, jnp.sum(largest.count(), dtype=jnp.int32) - entries

        # The blocks, beginning with this worker's own.
        turn = _hash.turn(state.count, 0)
        blocks = _hashed.split(coo, workers, plan.first, state.count, turn)
        order = (me + jnp.arange(workers, dtype=jnp.int32)) % workers
        held = jax.tree.map(lambda rows: rows[order], blocks.coo)
        overflow = coo.count() - jnp.sum(blocks.sent, dtype=jnp.int32)

        # Spar-Reduce-Scatter.
        for stage, step in enumerate(plan.rounds):
            distance = step.distance
            going = jax.tree.map(lambda rows, first=distance: rows[first:], held)
            message, filled, unsent = encode(going, me + distance, step.slots, stage)
            pairs = [(source, (source + distance) % workers) for source in range(workers)]
            with jax.named_scope("spardl/reduce_scatter"):
                came = transport.ppermute(message, axis, pairs)
            words += _dispatch.words_of_ppermute(message.size, workers, pairs)
            useful, overflow = useful + filled, overflow + unsent
            staying = jax.tree.map(lambda rows, most=distance: rows[:most], held)
            held = _add(staying, codec.decode(came, plan.width, dtype), step)

        # Every worker's own block goes to all workers.
        last = codec
        if indices_alone:
            last = _messages.indices_alone(codec, plan.slots, plan.width, dtype)
        message, filled, unsent = encode(held, me, plan.slots, len(plan.rounds), last)
        with jax.named_scope("spardl/allgather"):
            everyone = last.decode(transport.all_gather(message[0], axis), plan.width, dtype)
        words += _dispatch.words_of_all_gather(message.size, workers)
        total = at_indices([(everyone, owners(everyone, 0))])

        info = ReduceInfo.of(
            total,
            words,
            useful=useful + (workers - 1) * filled,
            overflow=overflow + unsent,
            threshold=_kth_magnitude.smallest_magnitude(total),
        )
        lost = [at_indices(kept)] if kept else []
        later = [(entries, entries.values) for entries in lost]
        undelivered = _messages.by_total(coo, blocks.sent, None, later, total)
        return total, undelivered, _frame.StepState(state.count + 1), info

    def choose(coo: PaddedCOO, state: _frame.StepState, *, axis: AxisName):
        total, _, state, info = reduce(coo, state, axis=axis, indices_alone=True)
        return total.indices, state, info

    spec = Spec.of("spardl", density=density, codec=chosen_codec)
    return SparseAllreduce(_frame.init, reduce, spec=spec, choose=choose)


def _add(held: PaddedCOO, received: PaddedCOO, step: _slots.Round) -> PaddedCOO:
    """Adds the received entries of the first blocks to the entries that are held.

    Args:
      held: a row for each block.
      received: the same, for as many blocks or fewer.
      step: the round.

    Returns:
      Rows of ``step.held`` slots, ascending.
    """
    # Joined one after the other, the blocks are one sparse vector.
    blocks, capacity = held.indices.shape
    regions = _slots.Regions(blocks * held.size, blocks, held.size)

    def in_line(rows: PaddedCOO) -> PaddedCOO:
        number = jnp.arange(rows.indices.shape[0], dtype=jnp.int32)
        entries = _equal_regions.from_region(rows, regions, number)
        return jax.tree.map(lambda x: x.reshape(1, -1), entries)

    total = _merge.reduce_blocks(
        [in_line(held), in_line(received)],
        regions.size,
        held.values.dtype,
        capacity=blocks * capacity + step.blocks * step.slots,
    )
    return _equal_regions.split(total, regions, step.held, jnp.uint32(0)).coo
