"""Algorithm 1 of Ok-Topk, composed of its phases."""

import math

import jax

from sparse_collectives import _hash, _validation, transport, wire
from sparse_collectives._data import Layout, PaddedCOO, as_layout
from sparse_collectives._sparse_ops import _bits, _compaction
from sparse_collectives._spec import Spec
from sparse_collectives._types import AxisName, Codec, ReduceInfo, SparseAllreduce
from sparse_collectives.allreduce._ok_topk import _delivery, _exchanges, _plan, _state
from sparse_collectives.allreduce._ok_topk._state import OkTopkState
from sparse_collectives.allreduce._parts import _frame, _messages

# As published: tau' of the paper's vision model and of its LSTM, and the gate of its balancing.
_PAPER_PERIOD, _PAPER_SLACK = 32, 4.0


def ok_topk(
    density: float,
    *,
    repartition_period: int = _plan.REPARTITION_PERIOD,
    global_period: int | None = None,
    slack: float | None = None,
    schedule: str | None = None,
    messages_in_flight: int = 4,
    regions: str = _plan.REGIONS,
    balance: str = "auto",
    paper: bool | str = False,
    codec: Codec | None = None,
) -> SparseAllreduce:
    r"""The sparse allreduce of Ok-Topk (Algorithm 1; Li and Hoefler, PPoPP 2022).

    .. math:: total = Topk(\sum_i coo_i), \quad k = \max(1, round(density \cdot n))

    Entries of a worker that are not in the total are in its ``undelivered``.

    Cost, with the default arguments and m = k / P, in words that each worker receives, padding
    included. The split and reduce takes ``(2.1 + 4 / sqrt(m)) k (P-1)/P``, and so does the
    allgather, or ``(2 + 6 / sqrt(m)) k (P-1)/P`` if that is less (in the split for selections of
    k slots only). The global threshold takes ``7 / sqrt(m) k (P-1)/P``, if that is at most 0.2 k
    or 4,096 words. Otherwise, and in addition in about P of 2,000 steps, it takes at most
    0.2 k (P-1)/P, but at least 248 (P-1)/P. The balancing takes nothing or, if chance made a region
    large, ``4 sqrt(m)``, at the extreme 2 k (P-1)/P. Except at the extreme this is within
    the paper's bound of 6 k (P-1)/P from about m = 90 on (``docs/architecture.md`` has a table);
    the lower bound is 2 k (P-1)/P (Theorem 3.1). Latency: three collectives in most steps, and five
    to ten small ones more in the others.

    Args:
      density: k / n of the result, in (0, 1].
      repartition_period: tau, steps between two repartitions of the index space, with
        ``regions='balanced'``. Deviation from the paper: after a step in which more than 1/8 of the
        entries found no slot, the next repartition follows at once.
      global_period: tau', steps between two evaluations of the exact global
        threshold. The default 1 selects exactly min(k, nonzeros) entries at
        every step; larger values reuse the threshold as the paper does, corrected
        by the count, and deliver at most k. (With ``paper`` the default is 32.)
      slack: slots of a message as a multiple of its share k / P, at least 1; from P on, or with
        ``math.inf``, there is room for everything. None: with hashed regions 1.05 k / P + 2
        sqrt(k / P) slots, or the even share of all entries that can be sent + 3 sqrt(k / P) if that
        is less; otherwise 1.25 k / P. Entries that find no slot stay with their worker, and which
        ones changes from step to step.
      schedule: ``'all_to_all'``, one collective, or the paper's ``'rotation'``, one message for
        each distance on the ring, in buckets. The result has the same bits. None: one collective,
        or with ``paper`` the rotation.
      messages_in_flight: messages of a rotation that may be under way together: a bucket. A bucket
        is added to the region's sums while the next one is under way (section 3.1.1), if the
        platform's collectives are asynchronous; each bucket costs a pass over the sums so far.
      regions: which worker owns which index. ``'hashed'``: every worker owns one of each P
        consecutive indices, by a hash of their place and of the step, so that no selection crowds
        an owner, however uneven it is and however much the workers differ. ``'balanced'``: the
        paper's boundaries, which follow the mean of the workers' selections; entries overflow if
        the workers differ. ``'equal'``, for comparison: regions of equal width that never change;
        entries overflow if selections are uneven.
      balance: ``'auto'``: as little as the counts require. For comparison, ``'always'``: everything
        by its rank at every step, 2 k (P-1)/P words; or ``'never'``: entries that do not fit a
        worker's slots of the allgather are not delivered, count as overflow of that worker, and
        stay with all who contributed; which entries these are changes from step to step.
      paper: reproduces the published algorithm. ``True``: Algorithm 1 as published. The
        global threshold is reused unchanged for tau' steps, and everything that reaches it
        is delivered. The regions are the paper's, and are cut again every tau steps only. Messages
        go by destination rotation, in buckets (section 3.1.1). Balancing
        happens if one worker has over four times the mean (or more than its slots of the
        allgather), and gives each ceil(m / P) of the m entries. ``'corrected'``: the same,
        but the global threshold is multiplied by 1.008 after a step that delivers more than
        4k/3, and divided by it after one with fewer than 2k/3, as in the program that the paper
        links to. The matching selector is ``select.threshold_reuse(density=density, servo=False,
        headroom=slack - 1)``, and with ``'corrected'`` the same with ``servo='fixed'``.
        The paper's messages have the size of their contents. Here all workers together have
        room for ``slack`` times k entries (4 by default): the block of a worker has ``slack``
        times k / P slots, or room for everything if P is at most ``slack``. Entries that find
        no slot stay with their worker. ``useful``, and not ``words``, has the words of the paper's
        messages: the pairs of the split, of the balancing and of the allgather, and
        every tau' steps the pairs of line 10, the allgather of all sums, which histograms
        replace here (so it may be above ``words``); boundaries and counts are as sent here.
      codec: encoding of the messages, from :mod:`sparse_collectives.wire`; exact by
        default. The rounding errors of a lossy one are in ``undelivered``: the error of an
        entry with its worker, and the error of a sum with the worker that sent it on. A
        worker's own region, and a single worker's selection, are not encoded.

    Returns:
      A :class:`SparseAllreduce`; its total is a PaddedCOO with the slots of all workers' messages
      of the allgather, indices in no order. With a lossy codec an index may occur up to three times
      in ``undelivered``, and ``overflow`` also counts the entries for which the codec had no room.

    Raises:
      ValueError: an argument out of its range.
      ValueError: at ``reduce``, an axis that is not bound, or a state made for another size or
        number of workers.

    References:
      Li and Hoefler, `Near-Optimal Sparse Allreduce for Distributed Deep
      Learning <https://doi.org/10.1145/3503221.3508399>`_, PPoPP 2022.
    """
    density = _validation.check_density(density)
    repartition_period = _validation.check_positive_int("repartition_period", repartition_period)
    if global_period is None:
        global_period = _PAPER_PERIOD if paper else 1
    global_period = _validation.check_positive_int("global_period", global_period)
    if slack is not None:
        slack = _validation.check_number("slack", slack, 1.0, math.inf)
    usual = "rotation" if paper else "all_to_all"
    order: str = _validation.check_choice(
        "schedule", usual if schedule is None else schedule, ("all_to_all", "rotation")
    )
    messages_in_flight = _validation.check_positive_int("messages_in_flight", messages_in_flight)
    regions = _validation.check_choice("regions", regions, ("hashed", "balanced", "equal"))
    balance = _validation.check_choice("balance", balance, ("auto", "always", "never"))
    chosen_codec = wire.raw() if codec is None else codec
    paper = _validation.check_choice("paper", paper, (False, True, _state.CORRECTED))
    if paper:
        if regions not in (_plan.REGIONS, "balanced") or balance != "auto":
            raise ValueError(
                f"paper={paper!r} has regions and a balancing of its own, got "
                f"regions={regions!r} and balance={balance!r}. Leave both out."
            )
        regions, balance, slack = "balanced", "paper", _PAPER_SLACK if slack is None else slack

    def init(layout: int | Layout, axis_size: int) -> OkTopkState:
        return _state.first(as_layout(layout).size, axis_size, regions)

    @_frame.sums_in_range(exact=chosen_codec.exact)
    def reduce(
        coo: PaddedCOO,
        state: OkTopkState,
        *,
        axis: AxisName,
        indices_alone: bool = False,
    ):
        workers, me = transport.axis_size(axis), transport.axis_index(axis)
        _state.check(state, coo.size, workers)
        k = _validation.count_from_density(density, coo.size)
        # The largest number of entries that are delivered.
        most, share_slack = k, slack
        if paper and slack is not None:
            most = min(coo.size, math.ceil(min(slack, float(coo.size)) * k))
            share_slack = math.inf if slack >= workers else 1.0
        plan = _plan.make_plan(
            coo.size,
            most,
            workers,
            regions=regions,
            slack=share_slack,
            selected=coo.capacity,
            windows=regions == "hashed"
            and global_period == 1
            and balance in ("auto", "never")
            and not paper,
        )
        # A single worker sends nothing, so nothing has to be encoded.
        codec = chosen_codec if workers > 1 else wire.raw()
        # After the selection, a caller that needs only indices needs no values.
        last, dtype = codec, coo.values.dtype
        if indices_alone:
            last = _messages.indices_alone(codec, plan.gather_slots, coo.size, dtype)

        def words_with(codec: Codec):
            return lambda slots, size: _messages.pair_words(codec, slots, size, dtype)

        exchanges = _plan.exchanges(plan, words_with(codec), balance, words_with(last))

        # Lines 5 to 7: agree on the regions.
        boundaries, consensus_words = state.boundaries, _messages.no_words()
        if regions == "balanced":
            with jax.named_scope(f"ok_topk/repartition.every{repartition_period}"):
                boundaries, consensus_words = _state.agree(
                    coo, state, repartition_period, exchanges.consensus, axis
                )
        owners = _state.Owners(workers, None if regions == "hashed" else boundaries, state.count)
        turn = _hash.turn(state.count, 0)

        # Line 8: each region's entries go to its owner.
        with jax.named_scope("ok_topk/split_reduce"):
            reduced = _exchanges.split_and_reduce(
                coo,
                lambda coo: owners.cut(coo, plan.split_slots, turn),
                axis=axis,
                codec=codec,
                seed=_hash.seed(state.count, 0, me),
                exchange=exchanges.split,
                owned_slots=plan.owned_slots,
                schedule=order,
                messages_in_flight=messages_in_flight,
            )

        # Lines 9 to 13: select the sums that are delivered, and spread them evenly.
        delivery = _delivery.deliver(
            reduced.entries,
            reduced.overflow,
            _delivery.Step(
                count=state.count,
                threshold=state.threshold,
                select_turn=_hash.turn(state.count, 2),
                balance_turn=_hash.turn(state.count, 1),
                seed=_hash.seed(state.count, 1, me),
                axis=axis,
                plan=plan,
                exchanges=exchanges,
                k=k,
                most=most,
                period=global_period,
                balance=balance,
                paper=bool(paper),
                codec=last,
                placed=lambda mine: owners.placed(mine, coo.size, me),
            ),
        )
        # Line 13, continued: gather them on all workers.
        with jax.named_scope("ok_topk/allgather"):
            gathered = _exchanges.gather(
                delivery.entries,
                delivery.held,
                axis=axis,
                codec=last,
                seed=_hash.seed(state.count, 2, me),
                exchange=exchanges.gather,
            )

        # Line 14: entries that were sent and are in the total are delivered, the rest is kept.
        total = owners.at_indices(gathered.total)
        later = [(owners.at_indices(delivery.entries), gathered.error)]
        if delivery.moved is not None:
            mine, missed = delivery.moved
            later.insert(0, (owners.at_indices(mine), missed))
        undelivered = _messages.by_total(coo, reduced.sent, reduced.error, later, total)

        threshold = _bits.magnitude_from_bits(delivery.threshold_bits)
        new_state = OkTopkState(
            count=state.count + 1,
            boundaries=boundaries,
            threshold=_state.next_threshold(
                threshold, delivery.passed, k, coo.size, period=global_period, paper=paper
            ),
            # Over 1/8 of all entries that could be sent.
            overflowed=(delivery.overflow > workers * k / 8) & (not paper),
        )
        words = _messages.words_in_all(
            consensus_words, reduced.words, delivery.words, gathered.words
        )
        info = ReduceInfo(
            delivered=delivery.delivered if last.exact else total.count(),
            overflow=reduced.overflow + delivery.unsent + gathered.unsent,
            threshold=threshold,
            words=words.received,
            useful=words.useful,
        )
        return total, undelivered, new_state, info

    def choose(coo: PaddedCOO, state: OkTopkState, *, axis: AxisName):
        total, _, state, info = reduce(coo, state, axis=axis, indices_alone=True)
        # The allgather has more slots than there are entries.
        k = _validation.count_from_density(density, coo.size)
        capacity = min(total.capacity, coo.size) if paper else k
        chosen, _ = _compaction.compact_mask(total, total.indices < total.size, capacity=capacity)
        return chosen.indices, state, info

    return SparseAllreduce(
        init,
        reduce,
        choose=choose,
        may_keep_partial_sums=not chosen_codec.exact,
        spec=Spec.of(
            "ok_topk",
            density=density,
            repartition_period=repartition_period,
            global_period=global_period,
            slack=slack,
            schedule=order,
            messages_in_flight=messages_in_flight,
            regions=regions,
            balance=balance,
            paper=paper,
            codec=chosen_codec,
        ),
    )
