"""The costs as the papers state them: messages of exact size, pairs of 2 words.

Table 1 and section 3 of Ok-Topk (Li and Hoefler, PPoPP 2022,
https://arxiv.org/abs/2201.07598), section 5.3 of SparCML (Renggli et al., SC 2019,
https://arxiv.org/abs/1802.08021), SparDL (https://arxiv.org/abs/2304.00737), and
equations 7, 9 and 10 of Shi et al. (MLSys 2021, https://arxiv.org/abs/2010.10458). log P
is taken as ceil(log2 P), so that every P >= 1 has a cost.
"""

from collections.abc import Callable

from sparse_collectives.cost_model._costs import Cost, Estimate, Workload, certain, log2_rounds

# Messages, and the least and the most words of a worker, from n, k, P >= 2 and log P.
_Formula = Callable[[int, int, int, int], tuple[float, float, float]]
_ONE_LEVEL: dict[str, _Formula] = {
    # Rabenseifner (Table 1).
    "dense": lambda n, k, p, log: (2 * log, 2 * n * (p - 1) / p, 2 * n * (p - 1) / p),
    # An allgather of all selections (Table 1); with estimated thresholds; with a tree (Table 1).
    "topk_a": lambda n, k, p, log: (log, 2 * k * (p - 1), 2 * k * (p - 1)),
    "gaussian_k": lambda n, k, p, log: (2 * log, 2 * k * (p - 1), 2 * k * (p - 1)),
    "gtopk": lambda n, k, p, log: (2 * log, 4 * k * log, 4 * k * log),
    # Table 1. Between k = n/2 and n, the best case in pairs is past the switch to dense.
    "topk_dsa": lambda n, k, p, log: (
        p + 2 * log,
        min(4 * k * ((p - 1) / p), (2 * k + n) * ((p - 1) / p)),
        (2 * k + n) * ((p - 1) / p),
    ),
    # Table 1, Theorem 3.1 and equation 3.
    "ok_topk": lambda n, k, p, log: (
        2 * p + 2 * log,
        2 * k * ((p - 1) / p),
        6 * k * ((p - 1) / p),
    ),
    # One team of workers.
    "spardl": lambda n, k, p, log: (2 * log, 4 * k * (p - 1) / p, 4 * k * (p - 1) / p),
    "ssar_recursive_double": lambda n, k, p, log: _recursive_double(k, p),
    # SparCML, 5.3.2 and 5.3.3: [2 (P-1)/P, P] k pairs; n (P-1)/P words and up to k pairs.
    "ssar_split_allgather": lambda n, k, p, log: (
        p - 1 + log,
        4 * k * ((p - 1) / p),
        2 * k * p,
    ),
    "dsar_split_allgather": lambda n, k, p, log: (
        p - 1 + log,
        n * (p - 1) / p,
        2 * k + n * (p - 1) / p,
    ),
}


def _recursive_double(k: int, workers: int) -> tuple[float, float, float]:
    """SparCML, 5.3.1: [log P, P - 1] k pairs, log P messages.

    If P is not a power of two, the workers beyond the largest power of two below P fold into a
    partner: one message at the beginning, and the result at the end (appendix A).
    """
    paired = 1 << (workers.bit_length() - 1)
    rounds = log2_rounds(paired)
    if paired == workers:
        return rounds, 2 * k * rounds, 2 * k * (workers - 1)
    # Without overlap a folded pair holds 2k, and a round at most doubles that; no worker holds
    # more than all entries.
    pairs = k + k * workers + sum(min(2 * k << t, k * workers) for t in range(rounds))
    return rounds + 2, 2 * k * (rounds + 2), 2 * pairs


def _tree(w: Workload) -> Estimate:
    """TreeAR: 2n words, 4 log m messages, between m nodes; chains of their g workers.

    These are the double binary trees of Sanders et al. (Parallel Computing 35, 2009), as in
    NCCL, the baseline of section 5.3 of Shi et al. A worker is an inner node of one tree, in
    which it receives half of the n values from each of its two children, and a leaf of the other
    tree. On the way back it receives half of the values in each tree. There are 2 log m messages
    in each direction, with a full pipeline; its blocks, whose best number depends on the network,
    are not counted. The workers of a node share its link, and in the node n values go along a
    chain and back.
    """
    group, nodes = w.inner_size, w.workers // w.inner_size
    words = 2 * w.size / group if nodes > 1 else 0
    inside = 2 * w.size if group > 1 else 0
    return certain(Cost(4 * log2_rounds(nodes), words, words, 2 * (group - 1), inside))


def _hierarchical(w: Workload) -> Estimate:
    """HiTopKComm: equations 7, 9 and 10, in words.

    With d = n components, density rho, m nodes of ``inner_size`` = g workers:
    (g-1) d/g and (g-1) rho d m / g words within a node, (m-1) rho d / g between
    the nodes. The equations count the values only, which gives the lower bound.
    With an index for each value the sparse terms double: the upper bound.
    """
    group, nodes = w.inner_size, w.workers // w.inner_size

    def cost(pair_words: int) -> Cost:
        outer = pair_words * (nodes - 1) * w.selected / group
        gathered = pair_words * (group - 1) * w.selected * nodes / group
        inside = (group - 1) * w.size / group + gathered
        return Cost(log2_rounds(nodes), outer, outer, group - 1 + log2_rounds(group), inside)

    return Estimate(cost(1), cost(2), cost(2))


_TWO_LEVELS = {"tree": _tree, "hierarchical": _hierarchical}
PAPER = (*_ONE_LEVEL, *_TWO_LEVELS)


def paper_cost(name: str, workload: Workload) -> Estimate:
    """The cost of an algorithm as its paper states it.

    Args:
      name: dense, tree, topk_a, gaussian_k, topk_dsa, gtopk, ok_topk, spardl,
        ssar_recursive_double, ssar_split_allgather, dsar_split_allgather, hierarchical.
      workload: n, k and P, and the workers of a node for ``hierarchical`` and ``tree``.

    Returns:
      Bounds. The papers give no expectation, so ``expected`` is the upper bound.

    Raises:
      ValueError: there is no such algorithm.

    Examples:
      >>> paper_cost("ok_topk", Workload(size=1000, selected=10, workers=4)).upper.words
      45.0
    """
    if name in _TWO_LEVELS:
        return _TWO_LEVELS[name](workload)
    if name not in _ONE_LEVEL:
        raise ValueError(f"name must be one of {', '.join(PAPER)}, got {name!r}.")
    if workload.workers == 1:
        return certain(Cost())
    n, k, workers = workload.size, workload.selected, workload.workers
    messages, *bounds = _ONE_LEVEL[name](n, k, workers, log2_rounds(workers))
    low, high = (Cost(messages, words, words) for words in bounds)
    return Estimate(low, high, high)
