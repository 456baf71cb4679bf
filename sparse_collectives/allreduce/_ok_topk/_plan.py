"""The static sizes of Ok-Topk: slots and words of each exchange, by phase.

The module is plain Python, for the algorithm and for the cost model.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from sparse_collectives._sparse_ops import _bits
from sparse_collectives.transport import _dispatch

# The defaults of the algorithm, which the cost model assumes.
REGIONS = "hashed"
REPARTITION_PERIOD = 64
# Slots as a multiple of the share k / P: regions that follow the data are uneven.
_SLACK = 1.25
# Hashed regions are uneven by chance only: slots for selections that are a little larger
# than k, and for two standard deviations; or for three, if no selection can be larger.
_HASHED_SLACK = 1.05
_HASHED_DEVIATIONS = 2.0
_HASHED_MOST_DEVIATIONS = 3.0

# Digit widths to choose from: wide ones need fewer rounds, and more words.
_DIGIT_WIDTHS = (11, 8, 4)
_MAX_HISTOGRAM_SHARE = 1 / 5
# Words that each worker sends about its selection: entries above the threshold, entries
# equal to it, and its overflow.
_COUNTS = 3
# A window reaches so many standard deviations to both sides. With eight workers, four of 1,000
# steps miss.
_WINDOW_DEVIATIONS = 3.5
# With a window each worker sends the counts above it and in it, its two ends, and its overflow.
_WINDOW_COUNTS = 5
# Windows of up to so many words in all are worth it however small k is, as they save latencies.
_WINDOW_WORDS = 4096

BRANCHES = ("none", "neighbours", "spread", "all_to_all")


class Plan(NamedTuple):
    """Slots of the messages.

    Attributes:
      size: n.
      workers: P.
      k: entries of the result.
      region: the largest number of indices that one worker may own.
      owned_slots: slots of the sums that one worker owns and may select from.
      split_slots: slots of the block from one worker to one owner in the split and reduce.
      gather_slots: slots of each worker in the allgather.
      ``neighbour_slots``: slots of the message to the right neighbor that balances.
      spread_slots: slots of a block of the all_to_all that deals out a surplus.
      rank_slots: slots of a block of the all_to_all of everything, ceil(k / P).
      window_ranks: the first and the last rank of the sums of a worker that it shows to find the
        global threshold. Both 0: none.
    """

    size: int
    workers: int
    k: int
    region: int
    owned_slots: int
    split_slots: int
    gather_slots: int
    neighbour_slots: int
    spread_slots: int
    rank_slots: int
    window_ranks: tuple[int, int] = (0, 0)

    @property
    def window(self) -> int:
        """Slots of a window; 0 if there is none."""
        return self.window_ranks[1] - self.window_ranks[0]


def make_plan(
    size: int,
    k: int,
    workers: int,
    *,
    regions: str = REGIONS,
    slack: float | None = None,
    selected: int | None = None,
    windows: bool = False,
) -> Plan:
    """Slots for k of n entries over P workers.

    Args:
      size: n.
      k: entries of the result.
      workers: P.
      regions: as for :func:`sparse_collectives.allreduce.ok_topk`.
      slack: likewise.
      selected: slots of a worker's selection; None: k.
      windows: whether windows are used to find the global threshold, if they are short.
    """
    selected = k if selected is None else selected
    # Regions that follow the data may be as long as the whole vector.
    region = -(-size // workers) if regions == "hashed" else size

    def slots(most: int) -> int:
        return int(min(_message_slots(k, most, workers, regions, slack), region, most))

    split, rank = slots(selected), math.ceil(k / workers)
    gather = max(rank, slots(k))
    # Both messages are about k (P-1) / (2P) words: with a slack of 1.25 a step that moves a
    # surplus stays within 6k (P-1)/P words, apart from rounding up at small k / P.
    neighbour = k * (workers - 1) // (4 * workers)
    if regions == "hashed":
        # With hashed regions chance alone makes a surplus.
        neighbour = min(neighbour, math.ceil(_HASHED_DEVIATIONS * math.sqrt(k / workers)))
    return Plan(
        size=size,
        workers=workers,
        k=k,
        region=region,
        owned_slots=min(workers * split, region),
        split_slots=split,
        gather_slots=gather,
        neighbour_slots=min(gather, max(1, neighbour)),
        spread_slots=max(1, rank // 4),
        rank_slots=rank,
        window_ranks=_window(k, workers, region) if windows else (0, 0),
    )


def _window(k: int, workers: int, region: int) -> tuple[int, int]:
    """The ranks among a worker's sums at which the k-th largest of all may be."""
    share = k / workers
    reach = math.ceil(_WINDOW_DEVIATIONS * math.sqrt(share)) + 1
    first, last = max(0, math.floor(share) - reach), min(region, math.ceil(share) + reach)
    words = workers * (last - first)
    worth = workers > 1 and words <= max(_MAX_HISTOGRAM_SHARE * k, _WINDOW_WORDS)
    return (first, last) if worth else (0, 0)


def _message_slots(k: int, most: int, workers: int, regions: str, slack: float | None) -> float:
    """Slots for the share k / P of one message; ``math.inf`` has room for everything.

    All owners together get at most ``most`` entries.
    """
    share = k / workers
    if slack is None and regions == "hashed":
        deviation = math.sqrt(share)
        usual = _HASHED_SLACK * share + _HASHED_DEVIATIONS * deviation
        return math.ceil(min(usual, most / workers + _HASHED_MOST_DEVIATIONS * deviation))
    slack = _SLACK if slack is None else slack
    # From P on, one message has room for everything.
    return math.inf if slack >= workers else math.ceil(slack * share)


def digits(k: int) -> tuple[tuple[int, int], ...]:
    """The (shift, width) of each digit of a magnitude, from the top.

    They are the widest digits whose histograms take at most 20 % of k words.
    """
    for width in _DIGIT_WIDTHS:
        shifts = range(_bits.MAGNITUDE_BITS, 0, -width)
        plan = tuple((max(0, top - width), min(width, top)) for top in shifts)
        if sum(2 << bits for _, bits in plan) <= _MAX_HISTOGRAM_SHARE * k:
            break
    return plan  # pyright: ignore[reportPossiblyUnboundVariable]


class Collective(NamedTuple):
    """One collective.

    Attributes:
      kind: ``'psum'``, ``'all_gather'``, ``'all_to_all'`` or ``'ppermute'``.
      words: words of one message: the whole operand of a psum, the contribution of one worker
        to an all_gather, one block of an all_to_all, the operand of a ppermute.
      slots: value-index pairs that fit into a message; 0 if it holds none.
    """

    kind: str
    words: int
    slots: int = 0

    def received(self, workers: int) -> float:
        """Words that each worker receives, padding included."""
        operand = self.words * workers if self.kind == "all_to_all" else self.words
        return _VOLUMES[self.kind](operand, workers)

    def slots_sent(self, workers: int) -> int:
        """Slots of the messages with different content that a worker sends to others."""
        return self.slots * (workers - 1 if self.kind == "all_to_all" else 1)


_VOLUMES: dict[str, Callable[[float, int], float]] = {
    "psum": _dispatch.words_of_all_reduce,
    "all_gather": _dispatch.words_of_all_gather,
    "all_to_all": _dispatch.words_of_all_to_all,
    "ppermute": _dispatch.words_of_ppermute,
}


class Collectives(NamedTuple):
    """The collectives of a step, in the order of Algorithm 1.

    Attributes:
      consensus: the agreement on the regions, once in a period.
      split: the split and reduce.
      window: the global selection with windows, if it uses them; otherwise, or if they
        fail, the next two.
      threshold: the histograms of the global threshold.
      counts: the counts of the global selection.
      balance: the balancing, one for each of :data:`BRANCHES`; None moves nothing.
      gather: the allgather of the result.
      published: the allgather of all sums, line 10 of Algorithm 1. It is never made, but the mode
        ``'paper'`` counts its words; otherwise None.
    """

    consensus: Collective
    split: Collective
    window: Collective | None
    threshold: tuple[Collective, ...]
    counts: Collective
    balance: tuple[Collective | None, ...]
    gather: Collective
    published: Collective | None = None


def exchanges(
    plan: Plan,
    pair_words: Callable[[int, int], int],
    balance: str = "auto",
    last_words: Callable[[int, int], int] | None = None,
) -> Collectives:
    """The collectives of a step.

    Args:
      plan: the slots.
      pair_words: ``pair_words(slots, size)``, the words of a message of so many slots
        with the indices of a vector of length ``size``.
      balance: the mode, as for :func:`sparse_collectives.allreduce.ok_topk`.
      last_words: the same for the balancing and the allgather; None: ``pair_words``.
    """
    last_words = pair_words if last_words is None else last_words

    def pairs(kind: str, slots: int) -> Collective:
        return Collective(kind, last_words(slots, plan.size), slots)

    by_rank = pairs("all_to_all", plan.rank_slots)
    branches = {
        "auto": (
            None,
            pairs("ppermute", plan.neighbour_slots),
            pairs("all_to_all", plan.spread_slots),
            by_rank,
        ),
        "always": (by_rank,) * len(BRANCHES),
        "never": (None,) * len(BRANCHES),
        "paper": (None, None, None, by_rank),
    }
    return Collectives(
        # Quotients and remainders of the P - 1 inner boundaries.
        consensus=Collective("psum", 2 * (plan.workers - 1)),
        split=Collective("all_to_all", pair_words(plan.split_slots, plan.region), plan.split_slots),
        window=Collective("all_gather", plan.window + _WINDOW_COUNTS) if plan.window else None,
        threshold=tuple(Collective("psum", 1 << width) for _, width in digits(plan.k)),
        counts=Collective("all_gather", _COUNTS),
        balance=branches[balance],
        gather=pairs("all_gather", plan.gather_slots),
        published=pairs("all_gather", plan.owned_slots) if balance == "paper" else None,
    )
