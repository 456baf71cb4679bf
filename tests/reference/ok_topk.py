"""Ok-Topk in plain NumPy, written from the paper, with messages of exact size.

No capacities, no schedules: what Algorithm 1 computes. It shares no code with
the library.
"""

import math
from typing import NamedTuple

import numpy as np


def local_topk(acc: np.ndarray, k: int) -> np.ndarray:
    """Topk(acc): the k largest magnitudes, lowest index first among equals; zeros never."""
    order = np.lexsort((np.arange(acc.size), -np.abs(acc.astype(np.float64))))[:k]
    selected = np.zeros(acc.size, bool)
    selected[order] = True
    return selected & (acc != 0)


def training_step(accs: np.ndarray, k: int):
    """Topk(sum_i Topk(acc_i)) ``f64[n]`` with its residuals (lines 4 to 6 of Algorithm 2)."""
    selected = np.stack([np.where(local_topk(acc, k), acc, 0) for acc in accs])
    total = selected.astype(np.float64).sum(axis=0)
    delivered = local_topk(total, k)
    return np.where(delivered, total, 0), np.where((selected != 0) & delivered, 0, accs)


def balanced(owned: list[int]) -> tuple[list[int], list[int]]:
    """How many entries each worker has after the balancing, and has passed on (section 3.1.2).

    If a worker has over four times the mean (section 5.3), every worker gets its share of the
    entries, in the order of the workers.
    """
    workers, total = len(owned), sum(owned)
    if max(owned) * workers <= 4 * total:
        return owned, [0] * workers
    has = np.repeat(np.arange(workers), owned)
    gets = np.arange(total) // math.ceil(total / workers)
    held = np.bincount(gets, minlength=workers)
    moved = np.bincount(has[has != gets], minlength=workers)
    return held.tolist(), moved.tolist()


class Step(NamedTuple):
    """The results of a step of :class:`Published`."""

    total: np.ndarray
    # How many entries each worker selected, and how many are in the total.
    selected: list[int]
    delivered: int
    # How many entries of the total each worker has before the balancing and after it.
    owned: list[int]
    held: list[int]
    # The words of 4 bytes that each worker sends to others: a pair is two words, and a message to
    # everyone counts once for each of the others.
    words: list[int]


class Published:
    """Algorithms 1 and 2 over many steps: regions last tau steps, both thresholds tau' (period).

    With ``corrected`` the counts move the thresholds: the local one is raised by 1.03 up to five
    times within a step while over 4k/3 entries reach it, then divided by 1.012 below 2k/3 and
    multiplied by it above 5k/4; the global one changes by 1.008 below 2k/3 and above 4k/3.
    """

    def __init__(self, workers, size, k, period, repartition=64, corrected=False):
        self.workers, self.size, self.k = workers, size, k
        self.period, self.repartition, self.corrected, self.t = period, repartition, corrected, 0
        self.residuals = np.zeros((workers, size))
        self.local = np.zeros(workers, np.float32)
        self.whole = np.float32(0)

    def step(self, gradients: np.ndarray) -> Step:
        """Takes ``gradients f[P, n]``, multiplied by the learning rate."""
        evaluates = self.t % self.period == 0
        cuts = self.t % self.repartition == 0
        self.t += 1
        acc = self.residuals + gradients
        if evaluates:
            self.local = np.array([self._kth(row) for row in acc])
        elif self.corrected:
            for worker, row in enumerate(acc):
                for _ in range(5):
                    if 3 * self._count(row, self.local[worker]) > 4 * self.k:
                        self.local[worker] *= np.float32(1.03)
        selected = np.where(np.abs(acc) >= self.local[:, None], acc, 0.0)
        counts = [int(row.sum()) for row in selected != 0]
        if self.corrected:
            for worker, count in enumerate(counts):
                self.local[worker] *= self._factor(count, 1.012, 5 / 4)
        if cuts:
            self.edges = self._consensus(selected != 0)
        owner = np.searchsorted(self.edges[1:-1], np.arange(self.size), side="right")
        reduced = selected.sum(axis=0)
        if evaluates:
            self.whole = self._kth(reduced)
        delivered = (np.abs(reduced) >= self.whole) & (reduced != 0)
        if self.corrected:
            self.whole *= self._factor(int(delivered.sum()), 1.008, 4 / 3)
        self.residuals = np.where((selected != 0) & delivered, 0.0, acc)

        owned = [int((delivered & (owner == worker)).sum()) for worker in range(self.workers)]
        held, moved = balanced(owned)
        others = self.workers - 1
        words = []
        for worker in range(self.workers):
            sent = 2 * int(((selected[worker] != 0) & (owner != worker)).sum())
            if evaluates:
                # Line 10: each worker sends all of its sums to all.
                sent += 2 * others * int(((reduced != 0) & (owner == worker)).sum())
            words.append(sent + 2 * moved[worker] + 2 * others * held[worker])
        return Step(
            np.where(delivered, reduced, 0.0), counts, int(delivered.sum()), owned, held, words
        )

    def _consensus(self, selected: np.ndarray) -> np.ndarray:
        """The mean of the workers' own boundaries, which cut their selections evenly."""
        inner = []
        for row in selected:
            places = np.flatnonzero(row)
            ranks = [part * len(places) // self.workers for part in range(1, self.workers)]
            inner.append(places[ranks])
        mean = np.sum(inner, axis=0) // self.workers
        return np.concatenate([[0], mean, [self.size]])

    def _factor(self, count: int, by: float, most: float) -> np.float32:
        if count > most * self.k:
            return np.float32(by)
        return np.float32(1 / by if 3 * count < 2 * self.k else 1)

    def _count(self, x: np.ndarray, threshold: np.float32) -> int:
        return int(((np.abs(x) >= threshold) & (x != 0)).sum())

    def _kth(self, x: np.ndarray) -> np.float32:
        magnitudes = np.sort(np.abs(x))[::-1]
        return np.float32(magnitudes[min(self.k, np.count_nonzero(x)) - 1])
