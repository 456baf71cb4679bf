"""Algorithm 1 of Ok-Topk, composed of its phases."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _hash, _validation, _volumes, padded_coo, transport, wire
from sparse_collectives._coo import _bits, compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce
from sparse_collectives.allreduce._parts import _messages, _range, _step
from sparse_collectives.allreduce.ok_topk import (
    _balance,
    _gather,
    _global_selection,
    _regions,
    _split_reduce,
    _undelivered,
)
from sparse_collectives.padded_coo import PaddedCOO

# Above this many workers the program of a rotation, one message for each
# distance, is longer than what it saves.
_ROTATION_MAX_WORKERS = 16


class OkTopkState(NamedTuple):
    """State of :func:`ok_topk`, the same on every worker.

    Attributes:
      count: ``i32[]``, steps taken.
      boundaries: ``i32[P + 1]``, where the regions begin and end.
      threshold: ``f32[]``, the global threshold of the next step.
      crowded: ``bool[]``, whether so many entries found no slot that the regions
        are to be cut anew at the next step.
    """

    count: jax.Array
    boundaries: jax.Array
    threshold: jax.Array
    crowded: jax.Array


def ok_topk(
    *,
    density: float,
    repartition_period: int = 64,
    global_period: int = 1,
    slack: float = 1.25,
    schedule: str = "auto",
    bucket_size: int = 4,
    regions: str = "balanced",
    balance: str = "auto",
    codec: Codec | None = None,
) -> SparseAllreduce:
    r"""The sparse allreduce of Ok-Topk (Algorithm 1; Li and Hoefler, PPoPP 2022).

    .. math:: total = Topk(\sum_i coo_i), \quad k = \max(1, round(density \cdot n))

    Entries of a worker that are not in the total are in its ``undelivered``.

    The words that each worker receives, padding and periodic work included, with
    the default arguments: 2.5 k (P-1)/P in the split and reduce, 2.5 k (P-1)/P in
    the allgather, at most 0.2 k (P-1)/P (but at least 248 (P-1)/P) for the global
    threshold, and for the balancing nothing, up to k (P-1)/(2P), or in the extreme
    2 k (P-1)/P. The paper's bound is 6 k (P-1)/P; the lower bound is 2 k (P-1)/P
    (Theorem 3.1). Latency: P - 1 messages (one with ``schedule='all_to_all'``), the
    allgather, up to one exchange of the balancing, and five to ten small
    collectives.

    Args:
      density: k / n of the result, in (0, 1].
      repartition_period: tau, steps between two repartitions of the index space.
        Deviation from the paper: a step on which more than an eighth of the
        entries found no slot brings the next one forward.
      global_period: tau', steps between two evaluations of the exact global
        threshold. 1, the default, selects exactly min(k, nonzeros) entries at
        every step; larger values reuse the threshold as the paper does, corrected
        by the count, and deliver at most k.
      slack: slots of a message as a multiple of its share k / P, at least 1; from P
        on, or ``math.inf``, there is room for everything.
        Entries that find no slot stay with their worker, and which ones changes
        from step to step.
      schedule: ``'rotation'`` (one message for each distance on the ring, in
        buckets), ``'all_to_all'`` (one collective), or ``'auto'``: rotation for
        up to 16 workers. The result has the same bits.
      bucket_size: messages of a rotation that may be in flight together.
      regions: ``'balanced'`` (the paper: boundaries that follow the selections), or,
        to compare with, ``'equal'``: of equal width, never cut anew. Entries then
        overflow where selections are uneven.
      balance: ``'auto'`` (as little as the counts require), or, to compare with,
        ``'always'``: everything by its rank at every step, 2 k (P-1)/P words; or
        ``'never'``: what does not fit a worker's slots of the allgather is not
        delivered, counts as overflow of that worker, and stays with all who
        contributed to it; which entries those are changes from step to step.
      codec: encoding of the messages, from :mod:`sparse_collectives.wire`; exact by
        default. What a lossy one loses is in ``undelivered``: the error of an entry
        with its worker, and that of a sum with the worker that sent it on. A
        worker's own region, and a single worker's selection, are not encoded.

    Returns:
      A :class:`SparseAllreduce`; its total is a PaddedCOO with about ``slack *
      k`` slots. With a lossy codec an index may occur up to three times in
      ``undelivered``, and ``overflow`` also counts what the codec had no room for.

    Raises:
      ValueError: an argument out of its range; at ``reduce``, an axis that is not
        bound, or a state made for another size or number of workers.

    References:
      Li and Hoefler, `Near-Optimal Sparse Allreduce for Distributed Deep
      Learning <https://doi.org/10.1145/3503221.3508399>`_, PPoPP 2022.
    """
    density = _validation.check_density(density)
    repartition_period = _validation.check_positive_int("repartition_period", repartition_period)
    global_period = _validation.check_positive_int("global_period", global_period)
    slack = _validation.check_number("slack", slack, 1.0, math.inf)
    schedule = _validation.check_choice("schedule", schedule, ("auto", "rotation", "all_to_all"))
    bucket_size = _validation.check_positive_int("bucket_size", bucket_size)
    regions = _validation.check_choice("regions", regions, ("balanced", "equal"))
    balance = _validation.check_choice("balance", balance, ("auto", "always", "never"))
    chosen_codec = wire.raw() if codec is None else codec

    def init(size: int, axis_size: int) -> OkTopkState:
        _validation.check_size(size)
        _validation.check_positive_int("axis_size", axis_size)
        return OkTopkState(
            count=jnp.zeros((), jnp.int32),
            boundaries=_regions.equal_regions(size, axis_size),
            threshold=jnp.zeros((), jnp.float32),
            # The first step cuts the regions, whatever its count.
            crowded=jnp.ones((), jnp.bool_),
        )

    @_range.sums_in_range(exact=chosen_codec.exact)
    def reduce(coo: PaddedCOO, state: OkTopkState, *, axis: AxisName):
        workers = transport.axis_size(axis)
        _check_state(state, coo, workers)
        k = _validation.count_from_density(density, coo.size)
        gain = 1 / max(math.log(coo.size / k), 1.0)
        plan = _balance.make_plan(k, workers, slack)
        # Between one worker and itself nothing has to be encoded.
        codec = chosen_codec if workers > 1 else wire.raw()
        block_capacity = coo.capacity
        if slack < workers:
            block_capacity = min(block_capacity, math.ceil(slack * k / workers))

        def pair_words(slots: int) -> int:
            message = padded_coo.empty(coo.size, slots, coo.values.dtype)
            return jax.eval_shape(codec.encode, message, jnp.uint32(0)).message.size

        def seed(phase: int) -> jax.Array:
            # Errors of different workers and steps don't add up if they are independent.
            return _hash.combine(state.count, phase, transport.axis_index(axis))

        # Lines 5 to 7: agree on the regions.
        repartition, boundaries = jnp.zeros((), jnp.bool_), state.boundaries
        if regions == "balanced":
            with jax.named_scope(f"ok_topk/repartition.every{repartition_period}"):
                repartition = (state.count % repartition_period == 0) | state.crowded
                boundaries = lax.cond(
                    repartition,
                    lambda: _regions.consensus(coo, workers, axis),
                    lambda: state.boundaries,
                )

        # Line 8: each region's entries to its owner.
        with jax.named_scope("ok_topk/split_reduce"):
            if workers == 1:
                reduced, sent, error = coo, coo.indices < coo.size, None
                exchanged = jnp.zeros((), jnp.int32)
            else:
                reduced, sent, error, exchanged = _split_reduce.split_and_reduce(
                    coo,
                    boundaries,
                    _step.turn(state.count, 0),
                    axis=axis,
                    codec=codec,
                    seed=seed(0),
                    capacity=block_capacity,
                    schedule=_schedule_for(schedule, workers),
                    bucket_size=bucket_size,
                )
        overflow = coo.count() - jnp.sum(sent, dtype=jnp.int32)

        # Lines 9 to 12: the global threshold.
        bits = _global_selection.deliverable_bits(reduced)
        evaluate = (state.count % global_period == 0) | (state.threshold <= 0)
        with jax.named_scope(f"ok_topk/global_threshold.every{global_period}"):
            if global_period == 1:
                threshold_bits = _global_selection.global_threshold(bits, k, axis)
            else:
                threshold_bits = lax.cond(
                    evaluate,
                    lambda: _global_selection.global_threshold(bits, k, axis),
                    lambda: _bits.magnitude_bits(state.threshold),
                )
        with jax.named_scope("ok_topk/global_selection"):
            selection = _global_selection.select_global(bits, threshold_bits, k, overflow, axis)
        mine, _ = compaction.compact_mask(
            reduced, selection.mask, capacity=min(k, reduced.capacity)
        )

        # Line 13: spread them evenly, then let everyone have them.
        branch = _balance.choose_branch(selection.quota, plan, axis)
        with jax.named_scope("ok_topk/balance"):
            balanced = _balance.balance(
                mine,
                selection.quota,
                branch,
                plan,
                axis=axis,
                codec=codec,
                seed=seed(1),
                mode=balance,
                turn=_step.turn(state.count, 1),
            )
        with jax.named_scope("ok_topk/allgather"):
            gathered = _gather.gather(balanced.entries, axis=axis, codec=codec, seed=seed(2))
        total = gathered.total

        # Line 14: what was sent and is in the total is delivered, the rest is kept.
        later = [(mine, balanced.error), (balanced.entries, gathered.error)]
        undelivered = _undelivered.undelivered(coo, sent, error, later, total)

        threshold = _bits.magnitude_from_bits(threshold_bits)
        ratio = jnp.clip(selection.passed / k, 1 / 16, 16.0)
        new_state = OkTopkState(
            count=state.count + 1,
            boundaries=boundaries,
            threshold=threshold if global_period == 1 else threshold * ratio**gain,
            # Over an eighth of all that could be sent.
            crowded=selection.overflow > workers * k / 8,
        )
        always_full = (
            jnp.where(repartition, _regions.words_received(workers), 0.0)
            + jnp.where(evaluate, _global_selection.threshold_words(k, workers), 0.0)
            + _global_selection.selection_words(workers)
        )
        split_words = _split_reduce.words_received(pair_words(block_capacity), workers)
        moved_words = _balance.words_received(plan, pair_words, balance)
        moved_words = jnp.asarray(moved_words, jnp.float32)[branch]
        gather_words = _volumes.all_gather(pair_words(plan.capacity), workers)
        words = always_full + split_words + moved_words + gather_words

        # Of what this worker sent, what is no padding.
        me = transport.axis_index(axis)
        moved = jnp.stack(_balance.entries_sent(selection.quota, me, plan, balance))[branch]
        moved_slots = jnp.asarray(_balance.slots_sent(plan, balance), jnp.float32)[branch]
        entries = balanced.entries.count() - gathered.lost
        useful = (
            always_full
            + _messages.useful_words(split_words, exchanged, (workers - 1) * block_capacity)
            + moved_words * (moved - balanced.lost).astype(jnp.float32) / moved_slots
            + _messages.useful_words(gather_words, entries, plan.capacity)
        )
        info = ReduceInfo(
            delivered=total.count(),
            overflow=overflow + balanced.lost + gathered.lost,
            threshold=threshold,
            words=words.astype(jnp.float32),
            useful=useful.astype(jnp.float32),
        )
        return total, undelivered, new_state, info

    return SparseAllreduce(
        init,
        reduce,
        spec=Spec.of(
            "ok_topk",
            density=density,
            repartition_period=repartition_period,
            global_period=global_period,
            slack=slack,
            schedule=schedule,
            bucket_size=bucket_size,
            regions=regions,
            balance=balance,
            codec=chosen_codec,
        ),
    )


def _schedule_for(schedule: str, workers: int) -> str:
    if schedule != "auto":
        return schedule
    return "rotation" if workers <= _ROTATION_MAX_WORKERS else "all_to_all"


def _check_state(state: OkTopkState, coo: PaddedCOO, workers: int) -> None:
    made_for = state.boundaries.shape[-1] - 1
    if made_for != workers:
        raise ValueError(
            f"state was made for {made_for} workers, but the axis has {workers}. Make a new one "
            f"with init(size={coo.size}, axis_size={workers})."
        )
