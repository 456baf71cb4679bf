"""What a training measures, and the steps and clocks that both methods share."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_collectives import PaddedCOO, SparseAllreduce

from .group import OWN, SAME, Group


class Run(NamedTuple):
    """A training with one exchange; lists have one entry for each epoch.

    Attributes:
      exchange: its name.
      objectives: before the first epoch and after each.
      seconds: of each epoch, without the evaluation of the objective.
      exchange_seconds: those of them spent in the exchange, waiting for others included.
      words: received by each worker in the epoch.
      delivered: entries in the total of a step, in the mean.
      steps: of an epoch.
      weights: ``f32[n]``, at the end.
    """

    exchange: str
    objectives: list[float]
    seconds: list[float]
    exchange_seconds: list[float]
    words: list[float]
    delivered: list[float]
    steps: int
    weights: np.ndarray


class Clock:
    """Sums up what the steps of one epoch take and move."""

    def __init__(self, group: Group):
        self.seconds = self.exchange_seconds = self.words = self.delivered = 0.0
        self._group = group
        self._infos: list[Any] = []

    def step(self, local: Callable[[], Any], exchange: Callable[[Any], Any], update) -> Any:
        """One step in three programs, each waited for; returns what ``update`` returns."""
        start = time.perf_counter()
        given = jax.block_until_ready(local())
        before = time.perf_counter()
        total, info = jax.block_until_ready(exchange(given))
        after = time.perf_counter()
        result = jax.block_until_ready(update(total))
        self.seconds += time.perf_counter() - start
        self.exchange_seconds += after - before
        self._infos.append(info)
        return result

    def close(self, run: Run) -> None:
        """Adds the epoch to ``run``, all but its objective, when the clock has stopped.

        Raises:
          RuntimeError: an entry found no slot: the sum was not that of the dense allreduce.
        """
        for words, delivered, overflow in self._infos:
            if self._group.mine_of(overflow).any():
                raise RuntimeError(f"{run.exchange}: an entry found no slot: its step has lost it")
            self.words += float(np.asarray(words))
            self.delivered += float(np.asarray(delivered)) / len(self._infos)
        run.seconds.append(self.seconds)
        run.exchange_seconds.append(self.exchange_seconds)
        run.words.append(self.words)
        run.delivered.append(self.delivered)


def exchange_of(allreduce: SparseAllreduce, group: Group, size: int) -> Callable[[PaddedCOO], Any]:
    """A function ``exchange(own PaddedCOO) -> (total, info)`` that keeps the allreduce's state."""

    def reduce(coo: PaddedCOO, state: Any) -> tuple[Any, ...]:
        total, _, state, info = allreduce.reduce(coo, state, axis=group.axis)
        return total, state, (info.words, info.delivered), info.overflow

    program = group.jit(reduce, [OWN, SAME], [SAME, SAME, SAME, OWN])
    state = group.same(jax.tree.map(np.asarray, allreduce.init(size, group.workers)))

    def exchange(coo: PaddedCOO) -> Any:
        nonlocal state
        total, state, counts, overflow = program(coo, state)
        return total, (*counts, overflow)

    return exchange
