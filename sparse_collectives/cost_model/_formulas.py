"""The costs of this library's algorithms: messages of static size, padding included.

Slots and message sizes come from the plain Python of the algorithms and codecs
themselves. A test checks that the words of all algorithms equal the words that
:mod:`sparse_collectives.traffic` reads from the traced programs. Message counts
assume trees for psum (2 log P), all_gather and reduce_scatter (log P), and one
message for each partner of an all_to_all.
"""

import dataclasses
import math
from collections.abc import Callable

from sparse_collectives._data import Layout
from sparse_collectives.allreduce import _partitioned_topk, _row_topk
from sparse_collectives.allreduce._ok_topk import _plan
from sparse_collectives.allreduce._parts import _codes, _few_bits, _slots, _sums
from sparse_collectives.allreduce._parts._few_bits import FewBits
from sparse_collectives.cost_model._codecs import MessageSizes, codec_sizes
from sparse_collectives.cost_model._costs import Cost, Estimate, Workload, certain, log2_rounds
from sparse_collectives.cost_model._fill_in import expected_union
from sparse_collectives.transport import _dispatch

# For several workers; `evaluate` also has the cost of one.
Formula = Callable[[Workload, MessageSizes], Estimate]

# Slots of a message as a multiple of its fair share: the algorithms' default.
SLACK = 1.25
# Words by which all workers of a mesh agree: how Ok-Topk balances, and whether it has to.
_BALANCE_FLAGS, _WINDOW_FLAGS = 3, 1
# Bytes of one bucket of the dense allreduce in buckets.
BUCKET_BYTES = 25 * 2**20


def evaluate(formula: Formula, w: Workload, codec: MessageSizes) -> Estimate:
    """The cost by a formula; one worker exchanges nothing."""
    return formula(w, codec) if w.workers > 1 else certain(Cost())


def _even(messages: float, words: float, pairs: float = 0.0) -> Cost:
    """A cost in which no worker waits for words that others receive."""
    return Cost(messages, words, words, pairs=pairs)


def _all_gather(message: float, workers: int, slots: int = 0) -> Cost:
    words = _dispatch.words_of_all_gather(message, workers)
    return _even(log2_rounds(workers), words, slots * (workers - 1))


def _all_to_all(block: float, workers: int, slots: int) -> Cost:
    return _even(workers - 1, block * (workers - 1), slots * (workers - 1))


def _psum(words: float, workers: int) -> Cost:
    return _even(2 * log2_rounds(workers), _dispatch.words_of_all_reduce(words, workers))


def dense(w: Workload, codec: MessageSizes) -> Estimate:
    """2n (P-1)/P words: one psum."""
    del codec
    return certain(_psum(w.size, w.workers))


def bucket_count(size: int) -> int:
    """How many buckets a gradient of n float32 makes."""
    return max(1, math.ceil(4 * size / BUCKET_BYTES))


def dense_bucketed(w: Workload, codec: MessageSizes) -> Estimate:
    """2n (P-1)/P words in buckets, each with the latency of a psum."""
    cost = dense(w, codec).expected
    return certain(_even(cost.messages * bucket_count(w.size), cost.words))


def topk_a(w: Workload, codec: MessageSizes) -> Estimate:
    """The allgather of k slots."""
    return certain(_all_gather(codec.pairs(w.selected, w.size), w.workers, w.selected))


def fill(w: Workload) -> float | None:
    """The argument ``fill`` that a measured overlap suggests."""
    if w.overlap is None:
        return None
    return expected_union(w.size, w.selected, w.workers, overlap=w.overlap) / w.selected


def ssar_recursive_double(w: Workload, codec: MessageSizes) -> Estimate:
    """Log P exchanges whose slots double, up to n words.

    The expected cost includes the allgather that types the total as replicated, as under
    ``shard_map(check_vma=True)``. Without types the last workers receive the total instead.
    """
    members = 1 << (w.workers.bit_length() - 1)
    surplus = w.workers - members

    def message(sources: int, receivers: int) -> Cost:
        words, pairs = _stream(codec, min(w.size, sources * w.selected), w.size)
        return Cost(1, words * receivers / w.workers, words, pairs=pairs)

    cost = message(1, surplus) if surplus else Cost()
    for stage in range(log2_rounds(members)):
        half = 1 << stage
        cost += message(half + min(surplus, half), members)
    slots, raw = min(w.size, w.workers * w.selected), codec_sizes("raw")
    if _stream(codec, slots, w.size)[1]:
        replicated = raw.pairs(math.ceil(slots / members), w.size)
    else:
        replicated = raw.dense(math.ceil(w.size / members))
    typed = cost + _all_gather(replicated, w.workers)
    untyped = cost + message(w.workers, surplus) if surplus else cost
    pairs = list(zip(*map(dataclasses.astuple, (untyped, typed)), strict=True))
    return Estimate(Cost(*map(min, pairs)), typed, Cost(*map(max, pairs)))


def _split(w: Workload, codec: MessageSizes) -> tuple[Cost, _slots.Regions, int]:
    """The exchange of blocks for regions of equal width, and the slots of a block."""
    regions = _slots.make_regions(w.size, w.workers)
    slots = _slots.block_slots(w.selected, regions, SLACK)
    words, pairs = _stream(codec, slots, regions.width)
    return _all_to_all(words, w.workers, pairs), regions, slots


def _stream(codec: MessageSizes, slots: int, size: int) -> tuple[int, int]:
    """Words of a message of so many pairs, or of all values if that is shorter; its pairs."""
    pairs, dense_words = codec.pairs(slots, size), codec.dense(size)
    return (dense_words, 0) if pairs > dense_words else (pairs, slots)


def ssar_split_allgather(w: Workload, codec: MessageSizes) -> Estimate:
    """The split, then an allgather of slots for the expected union, with slack."""
    split, regions, _ = _split(w, codec)
    slots = _slots.union_slots(w.selected, regions, w.workers, SLACK, fill(w))
    words, pairs = _stream(codec, slots, regions.width)
    return certain(split + _all_gather(words, w.workers, pairs))


def dsar_split_allgather(w: Workload, codec: MessageSizes) -> Estimate:
    """The split, then an allgather of the shortest form that fits the fullest region.

    The bounds are for the shortest and the longest form. The expected cost assumes that
    the fullest region has 1.25 times its share of the expected union.
    """
    split, regions, block = _split(w, codec)
    dense_words = codec.dense(regions.width)
    everything = min(regions.width, w.workers * block)
    forms = _slots.sparse_forms(
        everything,
        w.selected // w.workers,
        lambda slots: codec.pairs(slots, regions.width) <= dense_words,
    )
    fixed = split + _all_gather(1, w.workers)
    costs = [_all_gather(codec.pairs(slots, regions.width), w.workers, slots) for slots in forms]
    if not forms or forms[-1] < everything:
        costs.append(_all_gather(dense_words, w.workers))
    union = expected_union(w.size, w.selected, w.workers, overlap=w.overlap)
    fullest = min(SLACK * union / w.workers, everything)
    expected = costs[sum(fullest > slots for slots in forms)]
    ordered = sorted(costs, key=lambda cost: cost.words)
    return Estimate(fixed + ordered[0], fixed + expected, fixed + ordered[-1])


def ring_sparse(w: Workload, codec: MessageSizes) -> Estimate:
    """P - 1 messages around the ring, growing as the union does, and an allgather."""
    regions = _slots.make_regions(w.size, w.workers)
    block = _slots.block_slots(w.selected, regions, SLACK)
    slots, words, pairs, expansion = block, 0, 0, fill(w)
    for sources in range(2, w.workers + 1):
        more_words, more_pairs = _stream(codec, slots, regions.width)
        words, pairs = words + more_words, pairs + more_pairs
        room = _slots.union_slots(w.selected, regions, sources, SLACK, expansion)
        slots = min(slots + block, regions.width, room)
    cost = _even(w.workers - 1, words, pairs)
    words, pairs = _stream(codec, slots, regions.width)
    return certain(cost + _all_gather(words, w.workers, pairs))


def gtopk(w: Workload, codec: MessageSizes) -> Estimate:
    """A reduction tree of k slots, then a scatter tree and an allgather of blocks."""
    workers, rounds = w.workers, log2_rounds(w.workers)
    message = codec.pairs(w.selected, w.size)
    # Each worker except one is a source once.
    reduced = message * (workers - 1) / workers
    up = Cost(rounds, reduced, rounds * message, pairs=rounds * w.selected)
    block = math.ceil(message / workers)
    spans = [1 << level for level in range(rounds)]
    targets = {span: len(range(0, workers - span, 2 * span)) for span in spans}
    words = sum(span * block * targets[span] for span in spans) / workers
    down = Cost(rounds, words, sum(spans) * block)
    return certain(up + down + _all_gather(block, workers))


def spardl(w: Workload, codec: MessageSizes) -> Estimate:
    """Log P messages with P - 1 blocks in all, then an allgather of a block of each worker."""
    plan = _slots.make_halving(w.size, w.selected, w.workers, w.selected)
    reduced = Cost()
    for step in plan.rounds:
        words = step.blocks * codec.pairs(step.slots, plan.width)
        reduced += _even(1, words, step.blocks * step.slots)
    gathered = _all_gather(codec.pairs(plan.slots, plan.width), w.workers, plan.slots)
    return certain(reduced + gathered)


def row_topk(w: Workload, codec: MessageSizes) -> Estimate:
    """Blocks to the owners of rows, and an allgather: of one row, as the workload has no layers."""
    layout = Layout(((w.size,),))
    plan = _row_topk.make_plan(layout, w.density, -1, w.workers, w.selected)
    block, gathered = plan.block_slots, plan.owner_slots
    to_owners = _all_to_all(codec.pairs(block, w.size), w.workers, block)
    return certain(to_owners + _all_gather(codec.pairs(gathered, w.size), w.workers, gathered))


def partitioned_topk(bits: int | FewBits | None) -> Formula:
    """The allgather of the parts' indices, and the sums of the values of all workers there."""

    def formula(w: Workload, codec: MessageSizes) -> Estimate:
        del codec
        plan = _partitioned_topk.make_plan(w.size, w.selected, w.workers, w.density, bits)
        slots = plan.slots
        indices = _all_gather(plan.message_words, w.workers)
        if isinstance(plan.bits, FewBits):
            up, down = (_codes.words(slots, each) for each in plan.bits)
            values = _all_to_all(up, w.workers, slots) + _all_gather(down, w.workers, slots)
        else:
            values = _even(2 * log2_rounds(w.workers), plan.value_words, slots * w.workers)
        return certain(indices + values)

    return formula


def sum_of_all(bits: FewBits) -> Formula:
    """Codes of all values to the owners of their indices, and codes of the sums to all."""

    def formula(w: Workload, codec: MessageSizes) -> Estimate:
        del codec
        slots = _few_bits.slots_of(w.size, w.workers)
        up, down = (_codes.words(slots, each) for each in bits)
        return certain(_all_to_all(up, w.workers, slots) + _all_gather(down, w.workers, slots))

    return formula


def shared_random(w: Workload, codec: MessageSizes) -> Estimate:
    """The sum of k values; no index is sent."""
    del codec
    words = _sums.sum_words(w.selected, w.workers, 32)
    return certain(_even(2 * log2_rounds(w.workers), words, w.selected))


def _cost_of(exchange: _plan.Collective, workers: int) -> Cost:
    if exchange.kind == "psum":
        return _psum(exchange.words, workers)
    if exchange.kind == "all_gather":
        return _all_gather(exchange.words, workers, exchange.slots)
    if exchange.kind == "all_to_all":
        return _all_to_all(exchange.words, workers, exchange.slots)
    return _even(1, exchange.words, exchange.slots)


def ok_topk_flags(w: Workload) -> tuple[int, int, int]:
    """Words that all workers of a mesh agree on: at least, as expected, and at most."""
    plan = _plan.make_plan(w.size, w.selected, w.workers, windows=True)
    if not plan.window:
        return _BALANCE_FLAGS, _BALANCE_FLAGS, _BALANCE_FLAGS
    return _WINDOW_FLAGS, _WINDOW_FLAGS, _WINDOW_FLAGS + _BALANCE_FLAGS


def ok_topk(w: Workload, codec: MessageSizes) -> Estimate:
    """2.5k + 2.5k words in `raw`, at most 0.2k for the threshold, and the balancing.

    The lower and expected costs assume that windows show the threshold and that nothing has
    to be balanced. The upper cost assumes that they do not, and takes the longest of the
    exchanges that balance. Without windows, the threshold takes its rounds, and the expected
    cost assumes that the surplus goes to the neighbors.
    """
    plan = _plan.make_plan(w.size, w.selected, w.workers, windows=True)
    step = _plan.exchanges(plan, codec.pairs)
    fixed, rounds = Cost(), Cost()
    for exchange in (step.split, step.gather):
        fixed += _cost_of(exchange, w.workers)
    for exchange in (*step.threshold, step.counts):
        rounds += _cost_of(exchange, w.workers)
    if step.window is None:
        fixed += rounds
    # There are slots for all entries that a worker may own, so nothing is uneven.
    moves = [_cost_of(exchange, w.workers) for exchange in step.balance if exchange is not None]
    if plan.gather_slots >= min(plan.k, plan.owned_slots):
        moves = [Cost()]
    near, longest = moves[0], max(moves, key=lambda cost: cost.words)
    if step.window is not None:
        at_once = fixed + _cost_of(step.window, w.workers)
        return Estimate(at_once, at_once, at_once + rounds + longest)
    return Estimate(fixed, fixed + near, fixed + longest)
