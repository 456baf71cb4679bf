"""Words that one worker receives in one execution of each collective.

A word is four bytes. Each function assumes the bandwidth-optimal algorithm,
so that a volume depends on what is exchanged and not on how a backend
implements it. These are the beta terms of the alpha-beta model in section 3
of the Ok-Topk paper (https://arxiv.org/abs/2201.07598). Sending and receiving
volumes are equal, summed over the group.
"""

from collections.abc import Iterable, Sequence


def _check(words: float, P: int) -> None:
    if P < 1:
        raise ValueError(f"`P` is {P}; a group has at least 1 worker.")
    if words < 0:
        raise ValueError(f"`words` is {words}; pass a number of words >= 0.")


def all_reduce(words: float, P: int) -> float:
    """Reduce-scatter, then allgather (a ring, or Rabenseifner's algorithm).

    Args:
      words: words of the whole operand of one worker.
      P: workers in the group.

    Returns:
      `2 * words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return 2.0 * words * (P - 1) / P


def all_gather(words: float, P: int) -> float:
    """Each worker receives the contribution of every other worker.

    Args:
      words: words of the contribution of one worker.
      P: workers in the group.

    Returns:
      `words * (P - 1)`, in words received per worker.
    """
    _check(words, P)
    return float(words * (P - 1))


def all_to_all(words: float, P: int) -> float:
    """Each worker receives one block from every other worker.

    Args:
      words: words of the whole operand of one worker, all P blocks.
      P: workers in the group.

    Returns:
      `words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return float(words) * (P - 1) / P


def reduce_scatter(words: float, P: int) -> float:
    """Each worker receives what the others hold of its block.

    Args:
      words: words of the whole operand of one worker, all P blocks.
      P: workers in the group.

    Returns:
      `words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return float(words) * (P - 1) / P


def broadcast(words: float, P: int) -> float:
    """Every worker but the source receives the operand, as a mean over all.

    Args:
      words: words of the operand of the source.
      P: workers in the group.

    Returns:
      `words * (P - 1) / P`, in words received per worker.
    """
    _check(words, P)
    return float(words) * (P - 1) / P


def ppermute(words: float, P: int, pairs: Iterable[Sequence[int]] | None = None) -> float:
    """One message to each target, as a mean over the workers.

    Args:
      words: words of the operand of one worker.
      P: workers in the group.
      pairs: (source, target) pairs; a pair of a worker with itself moves
        nothing. None: every worker receives from another one.

    Returns:
      `words` times the share of workers that receive from another worker, in
      words received per worker.
    """
    _check(words, P)
    if P == 1:
        return 0.0
    if pairs is None:
        return float(words)
    receivers = sum(1 for source, target in pairs if source != target)
    return float(words) * receivers / P
