"""The costs of this library's algorithms: messages of static size, padding included.

Volumes follow from the slots of the buffers; a test holds those in ``VERIFIED``
equal to what :mod:`sparse_collectives.traffic` reads from the lowered programs.
Message counts assume trees for psum (2 log P), all_gather and reduce_scatter
(log P), and one message for each partner of an all_to_all.
"""

import math
from collections.abc import Callable

from sparse_collectives import _words
from sparse_collectives.cost_model._codecs import CodecCost, codec_cost
from sparse_collectives.cost_model._fill_in import expected_union
from sparse_collectives.cost_model._types import Cost, Estimate, Workload, certain, log2_rounds

Formula = Callable[[Workload, CodecCost], Estimate]

# Slots of a message as a multiple of its fair share: the algorithms' default.
SLACK = 1.25
# Steps between two repartitions of Ok-Topk, the default.
REPARTITION_PERIOD = 64
# Bytes of one bucket of the dense allreduce in buckets.
BUCKET_BYTES = 25 * 2**20


def _even(messages: float, words: float, pairs: float = 0.0) -> Cost:
    """A cost in which no worker waits for words that others receive."""
    return Cost(messages, words, words, pairs=pairs)


def dense(w: Workload, codec: CodecCost) -> Estimate:
    """2n (P-1)/P words: one psum."""
    del codec
    return certain(_even(2 * log2_rounds(w.workers), _words.all_reduce(w.size, w.workers)))


def bucket_count(size: int) -> int:
    """How many buckets a gradient of n float32 makes."""
    return max(1, math.ceil(4 * size / BUCKET_BYTES))


def dense_bucketed(w: Workload, codec: CodecCost) -> Estimate:
    """2n (P-1)/P words in buckets, each with the latency of a psum."""
    cost = dense(w, codec).expected
    return certain(_even(cost.messages * bucket_count(w.size), cost.words))


def topk_a(w: Workload, codec: CodecCost) -> Estimate:
    """The allgather of k slots."""
    message = codec.message_words(w.selected, w.density)
    pairs = w.selected * (w.workers - 1)
    return certain(_even(log2_rounds(w.workers), _words.all_gather(message, w.workers), pairs))


def _split(w: Workload, codec: CodecCost) -> tuple[Cost, int]:
    """The all_to_all of blocks of slack k/P slots, and the slots of a block."""
    slots = min(w.selected, math.ceil(SLACK * w.selected / w.workers))
    words = codec.message_words(slots, w.density) * (w.workers - 1)
    return _even(w.workers - 1, words, slots * (w.workers - 1)), slots


def ssar_recursive_double(w: Workload, codec: CodecCost) -> Estimate:
    """Log P exchanges whose slots double, until a dense message is shorter."""
    paired = 1 << (w.workers.bit_length() - 1)
    folded = w.workers - paired
    dense_words = math.ceil(w.size * codec.dense_words)

    def message(slots: int) -> float:
        slots = min(slots, w.size)
        return min(codec.message_words(slots, slots / w.size), dense_words)

    sent = [(w.selected, folded / w.workers)] if folded else []
    slots = w.selected * (2 if folded else 1)
    for _ in range(log2_rounds(paired)):
        sent.append((slots, paired / w.workers))
        slots = min(2 * slots, w.size)
    if folded:
        sent.append((slots, folded / w.workers))
    return certain(
        Cost(
            messages=len(sent),
            words=sum(message(slots) * share for slots, share in sent),
            path_words=sum(message(slots) for slots, _ in sent),
            pairs=sum(slots for slots, _ in sent),
        )
    )


def ssar_split_allgather(w: Workload, codec: CodecCost) -> Estimate:
    """The split, then an allgather of slots for the expected union, with slack."""
    split, block = _split(w, codec)

    def cost(union: float) -> Cost:
        slots = min(block * w.workers, math.ceil(w.size / w.workers), _share(SLACK * union, w))
        message = codec.message_words(slots, min(1.0, slots * w.workers / w.size))
        gathered = _words.all_gather(message, w.workers)
        return split + _even(log2_rounds(w.workers), gathered, slots * (w.workers - 1))

    union = expected_union(w.size, w.selected, w.workers, overlap=w.overlap)
    return Estimate(cost(w.selected), cost(union), cost(min(w.size, w.selected * w.workers)))


def dsar_split_allgather(w: Workload, codec: CodecCost) -> Estimate:
    """The split, then an allgather of dense regions."""
    split, _ = _split(w, codec)
    region = math.ceil(math.ceil(w.size / w.workers) * codec.dense_words)
    return certain(split + _even(log2_rounds(w.workers), _words.all_gather(region, w.workers)))


def ring_sparse(w: Workload, codec: CodecCost) -> Estimate:
    """2 (P-1) messages; region by region around the ring, growing as the union does."""

    def message(union: float) -> tuple[float, int]:
        slots = min(math.ceil(w.size / w.workers), _share(SLACK * union, w))
        return codec.message_words(slots, min(1.0, slots * w.workers / w.size)), slots

    def cost(unions: list[float]) -> Cost:
        # The partial sums go around once, then the result does.
        steps = [message(union) for union in unions[:-1]]
        steps += [message(unions[-1])] * (w.workers - 1)
        return _even(len(steps), sum(s[0] for s in steps), sum(s[1] for s in steps))

    counts = range(1, w.workers + 1)
    sizes = (w.size, w.selected)
    return Estimate(
        cost([float(w.selected) for _ in counts]),
        cost([expected_union(*sizes, p, overlap=w.overlap) for p in counts]),
        cost([float(min(w.size, w.selected * p)) for p in counts]),
    )


def gtopk(w: Workload, codec: CodecCost) -> Estimate:
    """A reduction tree and a broadcast tree of k slots, log P rounds each."""
    rounds = log2_rounds(w.workers)
    message = codec.message_words(w.selected, w.density)
    return certain(
        Cost(
            messages=2 * rounds,
            # Each worker but one is a source once, and a target of the broadcast once.
            words=2 * message * (w.workers - 1) / w.workers,
            path_words=2 * rounds * message,
            pairs=rounds * w.selected,
        )
    )


def _histogram_digits(k: int) -> list[int]:
    """Bits of each digit of the global threshold: the widest that take k/5 words at most."""
    digits = []
    for width in (11, 8, 4):
        digits = [min(width, top) for top in range(31, 0, -width)]
        if sum(2 << bits for bits in digits) <= k / 5:
            break
    return digits


def ok_topk(w: Workload, codec: CodecCost) -> Estimate:
    """2.5k + 2.5k words, at most 0.2k for the threshold, and the balancing.

    Lower: nothing to balance. Expected: the surplus goes to the neighbours. Upper:
    everything is dealt out anew.
    """
    if w.workers == 1:
        return certain(Cost())
    workers, k = w.workers, w.selected
    rounds = log2_rounds(workers)
    split, block = _split(w, codec)
    share = math.ceil(k / workers)
    slots = max(share, min(k, math.ceil(SLACK * k / workers)))
    fixed = split + _even(
        rounds,
        _words.all_gather(codec.message_words(slots, w.density), workers),
        slots * (workers - 1),
    )
    for bits in _histogram_digits(k):
        fixed += _even(2 * rounds, _words.all_reduce(1 << bits, workers))
    fixed += _even(rounds, _words.all_gather(3, workers))
    fixed += _even(
        2 * rounds / REPARTITION_PERIOD,
        _words.all_reduce(workers - 1, workers) / REPARTITION_PERIOD,
    )
    # Slots for everything that a worker can have: nothing is ever uneven.
    if slots >= min(k, workers * block, w.size):
        return certain(fixed)
    neighbour = min(slots, max(1, k * (workers - 1) // (4 * workers)))
    near = _even(1, codec.message_words(neighbour, w.density), neighbour)
    everything = codec.message_words(share, w.density) * (workers - 1)
    dealt = _even(workers - 1, everything, share * (workers - 1))
    return Estimate(fixed, fixed + near, fixed + dealt)


def _share(count: float, w: Workload) -> int:
    return max(1, math.ceil(count / w.workers))


def _within_nodes(w: Workload) -> Cost:
    """Reduce-scatter before and allgather after, dense, within a node."""
    group = w.inner_size
    shard = math.ceil(w.size / group)
    words = _words.reduce_scatter(shard * group, group) + _words.all_gather(shard, group)
    return Cost(inner_messages=2 * log2_rounds(group), inner_words=words)


def _between_nodes(w: Workload) -> Workload:
    """What is left for the workers that hold the same shard, one in each node."""
    size = math.ceil(w.size / w.inner_size)
    selected = min(size, max(1, round(w.density * size)))
    # The union of a shard is that share of the whole.
    return Workload(size, selected, w.workers // w.inner_size, overlap=_scaled(w, selected))


def _scaled(w: Workload, selected: int):
    if w.overlap is None:
        return None
    return w.overlap._replace(union=w.overlap.union * selected / w.selected)


def torus_2d(w: Workload, codec: CodecCost) -> Estimate:
    """2DTAR: reduce-scatter in the node, a psum of a shard, allgather in the node."""
    return certain(_within_nodes(w) + dense(_between_nodes(w), codec).expected)


def _hierarchical(formula: Formula) -> Formula:
    def cost(w: Workload, codec: CodecCost) -> Estimate:
        inner = _within_nodes(w)
        return Estimate(*(inner + cost for cost in formula(_between_nodes(w), codec)))

    cost.__doc__ = f"Between dense steps in the node, on a shard: {formula.__doc__}"
    return cost


IMPLEMENTATION: dict[str, Formula] = {
    "dense": dense,
    "dense_bucketed": dense_bucketed,
    "torus_2d": torus_2d,
    "topk_a": topk_a,
    "sparse_allgather": topk_a,
    "ssar_recursive_double": ssar_recursive_double,
    "ssar_split_allgather": ssar_split_allgather,
    "dsar_split_allgather": dsar_split_allgather,
    "ring_sparse": ring_sparse,
    "gtopk": gtopk,
    "ok_topk": ok_topk,
    "hierarchical(topk_a)": _hierarchical(topk_a),
    "hierarchical(ok_topk)": _hierarchical(ok_topk),
}

# Whose words a test compares with the program, for each codec it names.
VERIFIED = ("dense", "ok_topk")


def predict(name: str, workload: Workload, codec: str = "raw") -> Estimate:
    """The cost of one of this library's algorithms, with its default arguments.

    Args:
      name: a key of ``IMPLEMENTATION``: the name in ``sparse_collectives.allreduce``,
        or ``hierarchical(...)`` around one.
      workload: n, k and P, and the workers of a node where there are two levels.
      codec: the name of a factory in ``sparse_collectives.wire``.

    Returns:
      Bounds and the expected cost.

    Raises:
      ValueError: there is no such algorithm or codec.

    Examples:
      >>> predict("topk_a", Workload(size=1000, selected=10, workers=4)).expected.words
      60.0
    """
    if name not in IMPLEMENTATION:
        raise ValueError(f"name is {name!r}; pass one of {', '.join(IMPLEMENTATION)}.")
    return IMPLEMENTATION[name](workload, codec_cost(codec))
