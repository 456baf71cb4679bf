"""The largest sums of each row of each layer: ADTopk's selection with O(k) words."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_collectives import _hash, _validation, transport, wire
from sparse_collectives._data import Layout, PaddedCOO, as_layout, rows_of_layer
from sparse_collectives._platform import places, written
from sparse_collectives._sparse_ops import _bits, _compaction, _kth_magnitude
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce
from sparse_collectives.allreduce._parts import _frame, _merge, _messages, _replicas
from sparse_collectives.transport import _dispatch

# A row is divided among its owners if its share is more than 1/8 of an owner's part of k.
_LARGE = 8
# Slots for the part of divided rows that chance gives an owner: three standard deviations.
_DEVIATIONS = 3.0


class RowTopkState(NamedTuple):
    """State of :func:`row_topk`, the same on every worker.

    Attributes:
      count: ``i32[]``, steps taken.
      layout: the shapes of all layers; static.
    """

    count: jax.Array
    layout: Layout


def row_topk(density: float, *, row_axis: int = -1, codec: Codec | None = None) -> SparseAllreduce:
    r"""A global selection for each row: of the sums of each row of each layer, the largest ones.

    A layer has M rows of N entries, as in :func:`adtopk
    <sparse_collectives.select.published.adtopk>`. Each row has an owner. The workers send the
    entries of their selections to the owners of the rows (one all_to_all); an owner adds them up
    and keeps of each row

    .. math:: Topk(row), \quad \max(1, round(density \cdot N)) \text{ entries},

    and all workers gather the results. So the total has an entry of every row in which any worker
    has selected one, unless all sums of the row are 0. After ADTopk's selection :func:`ok_topk`
    delivers the largest sums of all rows together, and leaves most rows out; :func:`topk_a` leaves
    none out, in words that grow with P.

    Rows are dealt out in turn, those with the largest shares first, so that the slots of two owners
    differ by about one row. A row whose share is more than 1/8 of an owner's part of all slots (a
    long vector, or any row if there are few) is divided among as many owners as its share has
    entries, P at most. An owner then keeps its part of the share, from the entries of the row that
    a hash of the step gives it, and together they keep nearly the largest.

    Entries that find no slot, and entries that are not among the largest sums of their row, stay
    with the workers that selected them. If ADTopk has selected with the same density and
    ``row_axis``, every entry of an undivided row has a slot. In other selections more entries than
    slots may be for one owner; those that wait change from step to step.

    Cost in the alpha-beta model, for shares that add up to K (k, or more if rows are shorter than
    1 / density): ``4 K (P-1)/P`` words received with exact pairs, whatever the data: blocks of K/P
    slots to each owner, ``2 K (P-1)/P`` words, and as many in the allgather. Both grow by the share
    of one row if P does not divide the rows, by 1/8 at most unless it is one entry. The blocks grow
    by three standard deviations of the divided rows, ``6 sqrt(K/P) (P-1)`` words if all are.
    P - 1 + log2(P) latencies. Compute: a sort of K entries on each owner, about 10 passes over the
    entries, and a few over n / 32 words.

    Args:
      density: the share that is delivered of each row, in (0, 1]; at least one entry.
      row_axis: the axis of a layer's shape that numbers its rows; the same as the selector's.
      codec: encoding of the messages, exact by default. The worker that encodes keeps the rounding
        errors of a lossy codec.

    Returns:
      A :class:`SparseAllreduce` with a :class:`RowTopkState`. Its ``init`` takes the rows from a
      :class:`sparse_collectives.Layout` (:func:`optax_ext.sparse_allreduce` passes the layout of
      the parameters, and with sharded parameters the layout of a device's part); a number of
      entries means one row. Its total is a PaddedCOO of P times the slots of an owner; indices in
      no order. ``info.threshold`` is the smallest magnitude in it. ``info.overflow`` counts entries
      that found no slot, and entries that the codec left out.

    Raises:
      ValueError: a density outside (0, 1].
      ValueError: at ``init``, a layer of two or more dimensions without such an axis.
      ValueError: at ``reduce``, a selection from a vector of another length than the layout's, or
        an axis that is not bound.

    References:
      Ming et al., ADTopk, HPDC 2024, sections 4.4 and 6.2, which leave a scalable exchange of
      ADTopk's selection to the future. Owners that add up and select: Li and Hoefler, `Near-Optimal
      Sparse Allreduce <https://doi.org/10.1145/3503221.3508399>`_, PPoPP 2022.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> selector, allreduce = sc.select.published.adtopk(0.5), row_topk(0.5)
      >>> layout = sc.Layout(((2, 2),))  # The columns are the rows: indices 0, 2 and 1, 3.
      >>> def step(acc):
      ...     coo, _, _ = selector.select(acc, selector.init(layout))
      ...     return allreduce.reduce(coo, allreduce.init(layout, 2), axis="workers")[0].to_dense()
      >>> acc = jnp.array([[9.0, 1.0, 3.0, 2.0], [6.0, 1.0, 7.0, 3.0]])
      >>> sc.simulate(step, axis_size=2)(acc)[0].tolist()
      [9.0, 0.0, 0.0, 5.0]
    """
    density = _validation.check_density(density)
    row_axis = _validation.check_integer("row_axis", row_axis)
    codec = wire.raw() if codec is None else codec

    def init(layout: int | Layout, axis_size: int) -> RowTopkState:
        layout = as_layout(layout)
        for shape in layout.shapes:
            rows_of_layer(shape, row_axis)  # An axis that a layer lacks is an error.
        return RowTopkState(_frame.init(layout, axis_size).count, layout)

    @_frame.sums_in_range(exact=codec.exact)
    def reduce(coo: PaddedCOO, state: RowTopkState, *, axis: AxisName):
        workers, count, layout = transport.axis_size(axis), state.count, state.layout
        if coo.size != layout.size:
            raise ValueError(
                f"coo is of a vector of {coo.size} entries, but init was called with a layout of "
                f"{layout.size}: {layout.shapes}. Call init with the layout of this vector."
            )
        following = RowTopkState(count + 1, layout)
        if workers == 1:
            total, undelivered, info = _replicas.of_one_worker(coo, axis)
            return total, undelivered, following, info
        plan = make_plan(layout, density, row_axis, workers, coo.capacity)
        me, size, dtype = transport.axis_index(axis), coo.size, coo.values.dtype

        # To the owners.
        owner = written(lambda indices: plan.piece(indices, count)[0] % workers, coo.indices)
        owner = jnp.where(coo.indices < size, owner, workers)
        turn = _hash.turn(count, 0)
        blocks = _merge.split_by_owner(coo, owner, workers, plan.block_slots, turn)
        to_owners = codec.encode(blocks.coo, _hash.seed(count, 0, me))
        with jax.named_scope("row_topk/to_owners"):
            received = transport.all_to_all(to_owners.message, axis)
        sums = _merge.reduce_blocks([codec.decode(received, size, dtype)], size, dtype)
        largest = _largest_of_pieces(sums, plan, count)

        # From the owners.
        from_owners = codec.encode(largest, _hash.seed(count, 1, me))
        with jax.named_scope("row_topk/allgather"):
            gathered = transport.all_gather(from_owners.message, axis)
        everyone = codec.decode(gathered, size, dtype)
        total = PaddedCOO(everyone.values.reshape(-1), everyone.indices.reshape(-1), size)

        sent, error, later = blocks.sent, None, []
        if not codec.exact:
            sent = sent.at[blocks.source].set(to_owners.sent, mode="drop")
            error = jnp.zeros_like(coo.values).at[blocks.source].set(to_owners.error, mode="drop")
            rounded = _messages.kept_by_sender(largest, from_owners)
            later = [(rounded, rounded.values)]
        undelivered = _messages.by_total(coo, sent, error, later, total)
        words = _messages.words_in_all(
            _messages.words_of_pairs(
                _dispatch.words_of_all_to_all(to_owners.message.size, workers),
                _messages.to_others(to_owners.sent, me),
                (workers - 1) * plan.block_slots,
            ),
            _messages.words_of_pairs(
                _dispatch.words_of_all_gather(from_owners.message.size, workers),
                jnp.sum(from_owners.sent, dtype=jnp.int32),
                largest.capacity,
            ),
        )
        waiting = coo.count() - jnp.sum(sent, dtype=jnp.int32)
        info = ReduceInfo.of(
            total,
            words.received,
            useful=words.useful,
            overflow=waiting + _messages.unsent_count(largest, from_owners),
            threshold=_kth_magnitude.smallest_magnitude(total),
        )
        return total, undelivered, following, info

    return SparseAllreduce(
        init,
        reduce,
        spec=Spec.of("row_topk", density=density, row_axis=row_axis, codec=codec),
        may_keep_partial_sums=not codec.exact,
    )


class Plan(NamedTuple):
    """Which worker owns which row, and the slots of the messages.

    A *piece* is a row, or one of the parts of a divided row. Pieces have numbers, and piece i
    belongs to worker i mod P. The tuples have an element for each layer with entries.

    Attributes:
      workers: P.
      offset: the first index of a layer.
      rows: the rows of a layer, which is an array ``[before, rows, behind]``.
      behind: see ``rows``.
      share: the entries of a row that are delivered.
      pieces: the pieces of a row.
      first: the number of the first piece.
      block_slots: slots for the entries that a worker sends to an owner.
      owner_slots: slots for the entries that an owner sends to all.
    """

    workers: int
    offset: tuple[int, ...]
    rows: tuple[int, ...]
    behind: tuple[int, ...]
    share: tuple[int, ...]
    pieces: tuple[int, ...]
    first: tuple[int, ...]
    block_slots: int
    owner_slots: int

    def piece(self, indices: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The piece of each index at step ``count``, and the entries of it that are delivered.

        Returns:
          ``i32[c]`` each; without a meaning for padding.
        """
        layer = None
        if len(self.offset) > 1:
            layer = places(jnp.asarray(self.offset[1:], jnp.int32), indices, side="right")

        def of_layer(each: tuple[int, ...]) -> jax.Array | int:
            # Arithmetic with constants costs less.
            return each[0] if len({*each}) == 1 else jnp.asarray(each, jnp.int32)[layer]

        rows, behind, pieces = (of_layer(x) for x in (self.rows, self.behind, self.pieces))
        place = indices - of_layer(self.offset)
        run = place // behind
        row, column = run % rows, run // rows * behind + place % behind
        share = of_layer(self.share)
        number = of_layer(self.first) + row * of_layer(self._numbers_of_row)
        if max(self.pieces) == 1:
            return number, jnp.broadcast_to(share, number.shape)
        # Each run of consecutive entries of a row has one for each piece.
        turn = _hash.random_bits(_hash.turn(count, 1), number + column // pieces)
        turn = (turn % jnp.asarray(pieces, jnp.uint32)).astype(jnp.int32)
        piece = (column % pieces + turn) % pieces
        return number + piece, (share - piece + pieces - 1) // pieces

    @property
    def _numbers_of_row(self) -> tuple[int, ...]:
        """How far the next row begins: a divided one has a slot of its share at each number."""
        return tuple(s if p > 1 else 1 for s, p in zip(self.share, self.pieces, strict=True))


def make_plan(layout: Layout, density: float, row_axis: int, workers: int, selected: int) -> Plan:
    """Deals out the rows of a layout, for selections of ``selected`` slots."""
    layers = []
    for shape, offset in zip(layout.shapes, layout.offsets, strict=True):
        if 0 not in shape:
            before, rows, behind = rows_of_layer(shape, row_axis)
            share = _validation.count_from_density(density, before * behind)
            layers.append((offset, rows, behind, share))
    offset, rows, behind, share = zip(*layers, strict=True)
    total = sum(r * s for r, s in zip(rows, share, strict=True))
    pieces = tuple(min(workers, s) if _LARGE * workers * s > total else 1 for s in share)
    # The slots of divided rows are dealt out one by one, and then the other rows.
    first, number, divided = [0] * len(layers), 0, 0
    loads = np.zeros(workers, np.int64)
    for i in sorted(range(len(layers)), key=lambda i: (pieces[i] == 1, -share[i])):
        first[i] = number
        slots, each = (1, rows[i] * share[i]) if pieces[i] > 1 else (share[i], rows[i])
        divided += each if pieces[i] > 1 else 0
        # The numbers from `first` on that each worker has.
        behind_first = (np.arange(workers) - number) % workers
        loads += slots * ((np.maximum(each - behind_first, 0) + workers - 1) // workers)
        number += each
    most = int(loads.max())
    spread = math.ceil(_DEVIATIONS * math.sqrt(-(-divided // workers)))
    return Plan(
        workers,
        *(offset, rows, behind, share, pieces, tuple(first)),
        block_slots=min(selected, most + spread),
        owner_slots=most,
    )


def _largest_of_pieces(sums: PaddedCOO, plan: Plan, count: jax.Array) -> PaddedCOO:
    """The largest sums of each piece, in their order; the first of equal ones, and no zeros."""
    bits = jnp.where(sums.indices < sums.size, _bits.magnitude_bits(sums.values), 0)
    number, share = plan.piece(sums.indices, count)
    # A number beyond all others, for padding.
    number = jnp.where(bits > 0, number, jnp.iinfo(jnp.int32).max)
    slot = jnp.arange(sums.capacity, dtype=jnp.int32)
    number, _, order = lax.sort((number, -bits, slot), num_keys=2, is_stable=True)
    rank = slot - places(number, number)
    chosen = jnp.zeros((sums.capacity,), jnp.bool_).at[order].set(rank < share[order])
    return _compaction.compact_mask(sums, chosen & (bits > 0), capacity=plan.owner_slots)[0]
