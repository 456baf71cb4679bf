"""The types of the cost model: a workload, a network and a cost."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from sparse_collectives import _units
from sparse_collectives.cost_model._fill_in import Overlap, check_counts

BYTES_PER_WORD = 4


class Network(NamedTuple):
    r"""The alpha-beta model of a network: a message of L words takes alpha + beta L.

    Attributes:
      latency: alpha in seconds, of one message.
      seconds_per_word: beta, for one worker while all of them communicate.
      inner_latency: alpha within a node; 0 if there is one level.
      inner_seconds_per_word: beta within a node; 0 if there is one level.
    """

    latency: float
    seconds_per_word: float
    inner_latency: float = 0.0
    inner_seconds_per_word: float = 0.0


def network(
    latency: float | str,
    bandwidth: float | str,
    *,
    inner_latency: float | str = 0.0,
    inner_bandwidth: float | str | None = None,
) -> Network:
    """Makes a :class:`Network` from a latency and a bandwidth.

    Args:
      latency: the latency of one message, in seconds, or text such as ``"5us"``.
      bandwidth: the bandwidth of one worker while all communicate, in bytes per
        second, or text such as ``"25Gbit"`` or ``"3GB/s"``.
      inner_latency: the latency within a node.
      inner_bandwidth: the bandwidth within a node. None: there is one level.

    Raises:
      ValueError: a unit is unknown, a latency is negative, or a bandwidth is not
        above 0.

    Examples:
      >>> network("5us", "32Gbit")
      Network(latency=5e-06, seconds_per_word=1e-09, inner_latency=0.0, inner_seconds_per_word=0.0)
    """
    beta = BYTES_PER_WORD / _units.bandwidth("bandwidth", bandwidth)
    inner_beta = 0.0
    if inner_bandwidth is not None:
        inner_beta = BYTES_PER_WORD / _units.bandwidth("inner_bandwidth", inner_bandwidth)
    alpha = _units.seconds("latency", latency)
    return Network(alpha, beta, _units.seconds("inner_latency", inner_latency), inner_beta)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One step of data-parallel training, as the exchange sees it.

    Attributes:
      size: n, gradient components.
      selected: k, entries that each worker selects.
      workers: P.
      inner_size: workers of a node, a divisor of P. 1: there is one level.
      overlap: how much the workers' selections have in common; None: uniform and
        independent indices.
    """

    size: int
    selected: int
    workers: int
    inner_size: int = 1
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        check_counts(self.size, self.selected, self.workers)
        if self.inner_size < 1 or self.workers % self.inner_size:
            raise ValueError(
                f"inner_size must be the number of workers in a node, a divisor of "
                f"workers={self.workers}, got {self.inner_size}."
            )

    @property
    def density(self) -> float:
        """The share k / n."""
        return self.selected / self.size


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one exchange for one worker; costs add.

    Attributes:
      messages: how many times alpha is paid: messages in sequence on the longest path.
      words: 4-byte words that a worker receives, as a mean over the workers.
        ``ReduceInfo.words`` and :mod:`sparse_collectives.traffic` count the same.
      path_words: words in sequence on the longest path, for each of which beta is
        paid. They exceed ``words`` if some workers wait for others.
      inner_messages: as ``messages``, within a node.
      inner_words: as ``path_words``, within a node.
      pairs: value-index pairs that a worker receives and has to merge.
    """

    messages: float = 0.0
    words: float = 0.0
    path_words: float = 0.0
    inner_messages: float = 0.0
    inner_words: float = 0.0
    pairs: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(a + b for a, b in pairs))

    def seconds(self, network: Network) -> float:
        """Seconds of the exchange, without local work."""
        outer = self.messages * network.latency + self.path_words * network.seconds_per_word
        inner = (
            self.inner_messages * network.inner_latency
            + self.inner_words * network.inner_seconds_per_word
        )
        return outer + inner


class Estimate(NamedTuple):
    """Bounds of a cost that depends on the data.

    Attributes:
      lower: the best case.
      expected: what the planner uses.
      upper: the worst case.
    """

    lower: Cost
    expected: Cost
    upper: Cost


def certain(cost: Cost) -> Estimate:
    """A cost that does not depend on the data."""
    return Estimate(cost, cost, cost)


def log2_rounds(workers: int) -> int:
    """The smallest r with 2**r >= P: rounds after which a worker can have data of all."""
    return (workers - 1).bit_length()
