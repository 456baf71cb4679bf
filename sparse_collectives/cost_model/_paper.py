"""The costs as the papers state them: messages of exact size, pairs of 2 words.

Table 1 and section 3 of Ok-Topk (Li and Hoefler, PPoPP 2022,
https://arxiv.org/abs/2201.07598), section 5.3 of SparCML (Renggli et al., SC 2019,
https://arxiv.org/abs/1802.08021), SparDL (https://arxiv.org/abs/2304.00737), and
equations 7, 9 and 10 of Shi et al. (MLSys 2021, https://arxiv.org/abs/2010.10458). log P
is taken as ceil(log2 P), so that every P >= 1 has a cost.
"""

from collections.abc import Callable

from sparse_collectives.cost_model._types import Cost, Estimate, Workload, log2_rounds


def _bounds(messages: float, lower: float, upper: float) -> Estimate:
    low, high = (Cost(messages, words, words) for words in (lower, upper))
    return Estimate(low, high, high)


def dense(w: Workload) -> Estimate:
    """2n (P-1)/P words, 2 log P messages: Rabenseifner (Table 1)."""
    words = 2 * w.size * (w.workers - 1) / w.workers
    return _bounds(2 * log2_rounds(w.workers), words, words)


def tree(w: Workload) -> Estimate:
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
    cost = Cost(
        messages=4 * log2_rounds(nodes),
        words=words,
        path_words=words,
        inner_messages=2 * (group - 1),
        inner_words=2 * w.size if group > 1 else 0,
    )
    return Estimate(cost, cost, cost)


def topk_a(w: Workload) -> Estimate:
    """2k (P-1) words, log P messages: an allgather of all selections (Table 1)."""
    words = 2 * w.selected * (w.workers - 1)
    return _bounds(log2_rounds(w.workers), words, words)


def gaussian_k(w: Workload) -> Estimate:
    """2k (P-1) words, 2 log P messages: TopkA with estimated thresholds (Table 1)."""
    words = 2 * w.selected * (w.workers - 1)
    return _bounds(2 * log2_rounds(w.workers), words, words)


def topk_dsa(w: Workload) -> Estimate:
    """[4k, 2k + n] (P-1)/P words, P + 2 log P messages (Table 1)."""
    share = (w.workers - 1) / w.workers
    # Between k = n/2 and n, the best case in pairs is past the switch to dense.
    upper = (2 * w.selected + w.size) * share
    messages = w.workers + 2 * log2_rounds(w.workers) if w.workers > 1 else 0
    return _bounds(messages, min(4 * w.selected * share, upper), upper)


def gtopk(w: Workload) -> Estimate:
    """4k log P words, 2 log P messages: a reduction tree, then a broadcast (Table 1)."""
    rounds = log2_rounds(w.workers)
    return _bounds(2 * rounds, 4 * w.selected * rounds, 4 * w.selected * rounds)


def ok_topk(w: Workload) -> Estimate:
    """[2k, 6k] (P-1)/P words, 2P + 2 log P messages (Table 1, Theorem 3.1, equation 3)."""
    share = (w.workers - 1) / w.workers
    messages = 2 * w.workers + 2 * log2_rounds(w.workers) if w.workers > 1 else 0
    return _bounds(messages, 2 * w.selected * share, 6 * w.selected * share)


def spardl(w: Workload) -> Estimate:
    """4k (P-1)/P words, 2 log P messages: one team of workers (arXiv 2304.00737)."""
    words = 4 * w.selected * (w.workers - 1) / w.workers
    return _bounds(2 * log2_rounds(w.workers), words, words)


def ssar_recursive_double(w: Workload) -> Estimate:
    """[log P, P - 1] k pairs, log P messages (section 5.3.1).

    If P is not a power of two, the workers beyond the largest power of two below
    P fold into a partner: one message at the beginning, and the result at the end
    (appendix A).
    """
    paired = 1 << (w.workers.bit_length() - 1)
    rounds = log2_rounds(paired)
    if paired == w.workers:
        return _bounds(rounds, 2 * w.selected * rounds, 2 * w.selected * (w.workers - 1))
    # Without overlap a folded pair holds 2k, and a round at most doubles that; no
    # worker holds more than all entries.
    everything = w.selected * w.workers
    pairs = w.selected + everything
    pairs += sum(min(2 * w.selected << t, everything) for t in range(rounds))
    return _bounds(rounds + 2, 2 * w.selected * (rounds + 2), 2 * pairs)


def ssar_split_allgather(w: Workload) -> Estimate:
    """[2 (P-1)/P, P] k pairs, P - 1 + log P messages (section 5.3.2)."""
    if w.workers == 1:
        return _bounds(0, 0, 0)
    share = (w.workers - 1) / w.workers
    messages = w.workers - 1 + log2_rounds(w.workers)
    return _bounds(messages, 4 * w.selected * share, 2 * w.selected * w.workers)


def dsar_split_allgather(w: Workload) -> Estimate:
    """[0, k] pairs and n (P-1)/P words, P - 1 + log P messages (section 5.3.3)."""
    if w.workers == 1:
        return _bounds(0, 0, 0)
    dense_words = w.size * (w.workers - 1) / w.workers
    messages = w.workers - 1 + log2_rounds(w.workers)
    return _bounds(messages, dense_words, 2 * w.selected + dense_words)


def hierarchical(w: Workload) -> Estimate:
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
        return Cost(
            messages=log2_rounds(nodes),
            words=outer,
            path_words=outer,
            inner_messages=group - 1 + log2_rounds(group),
            inner_words=(group - 1) * w.size / group + gathered,
        )

    return Estimate(cost(1), cost(2), cost(2))


PAPER: dict[str, Callable[[Workload], Estimate]] = {
    "dense": dense,
    "tree": tree,
    "topk_a": topk_a,
    "gaussian_k": gaussian_k,
    "topk_dsa": topk_dsa,
    "gtopk": gtopk,
    "ok_topk": ok_topk,
    "spardl": spardl,
    "ssar_recursive_double": ssar_recursive_double,
    "ssar_split_allgather": ssar_split_allgather,
    "dsar_split_allgather": dsar_split_allgather,
    "hierarchical": hierarchical,
}


def paper_cost(name: str, workload: Workload) -> Estimate:
    """The cost of an algorithm as its paper states it.

    Args:
      name: a key of ``PAPER``: dense, tree, topk_a, gaussian_k, topk_dsa, gtopk, ok_topk,
        spardl, ssar_recursive_double, ssar_split_allgather, dsar_split_allgather,
        hierarchical.
      workload: n, k and P, and the workers of a node for ``hierarchical`` and ``tree``.

    Returns:
      Bounds. The papers give no expectation, so ``expected`` is the upper bound.

    Raises:
      ValueError: there is no such algorithm.

    Examples:
      >>> paper_cost("ok_topk", Workload(size=1000, selected=10, workers=4)).upper.words
      45.0
    """
    if name not in PAPER:
        raise ValueError(f"name must be one of {', '.join(PAPER)}, got {name!r}.")
    return PAPER[name](workload)


def sparse_limit(size: int, *, value_words: float = 1.0, index_words: float = 1.0) -> float:
    """delta: the number of pairs from which on a dense message is shorter.

    SparCML, section 5.1. It is n / 2 for pairs of a float32 and an int32.
    """
    return size * value_words / (value_words + index_words)
