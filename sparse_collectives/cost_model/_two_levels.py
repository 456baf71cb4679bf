"""The costs of the schemes for workers grouped in nodes."""

import math
from collections.abc import Callable

from sparse_collectives.cost_model._codecs import MessageSizes
from sparse_collectives.cost_model._costs import Cost, Estimate, Workload, certain, log2_rounds
from sparse_collectives.cost_model._formulas import Formula, dense, evaluate
from sparse_collectives.transport import _dispatch

INFO_WORDS = 3


def _within_nodes(w: Workload) -> Cost:
    """A dense reduce-scatter before and a dense allgather after, within a node."""
    group = w.inner_size
    shard = math.ceil(w.size / group)
    words = _dispatch.words_of_reduce_scatter(shard * group, group) + _dispatch.words_of_all_gather(
        shard, group
    )
    return Cost(inner_messages=2 * log2_rounds(group), inner_words=words)


def _between_nodes(w: Workload) -> Workload:
    """The workload of the workers that hold the same shard, one in each node."""
    size, overlap = math.ceil(w.size / w.inner_size), w.overlap
    selected = min(size, max(1, round(w.density * size)))
    if overlap is not None:
        # The union of a shard is the same share of the whole union.
        overlap = overlap._replace(union=overlap.union * selected / w.selected)
    return Workload(size, selected, w.workers // w.inner_size, overlap=overlap)


def torus_2d(w: Workload, codec: MessageSizes) -> Estimate:
    """2DTAR: reduce-scatter in the node, a psum of a shard, allgather in the node."""
    return certain(_within_nodes(w) + dense(_between_nodes(w), codec).expected)


def hierarchical(
    formula: Formula, flags_of: Callable[[Workload], tuple[int, int, int]] | None = None
) -> Formula:
    """An exchange of shards between nodes, inside a dense exchange within them.

    ``flags_of`` returns the words that it sums over the workers of a node, so that all of them
    take the same branch: at least, as expected, and at most.
    """

    def cost(w: Workload, codec: MessageSizes) -> Estimate:
        group, rounds = w.inner_size, log2_rounds(w.inner_size)
        # Count, threshold and words, which the workers of a node exchange.
        inner = _within_nodes(w) + Cost(
            inner_messages=rounds, inner_words=_dispatch.words_of_all_gather(INFO_WORDS, group)
        )
        outer = _between_nodes(w)
        costs = [inner + cost for cost in evaluate(formula, outer, codec)]
        if flags_of is not None:
            for i, words in enumerate(flags_of(outer)):
                summed = _dispatch.words_of_all_reduce(words, group)
                costs[i] += Cost(inner_messages=2 * rounds, inner_words=summed)
        return Estimate(*costs)

    return cost
