"""Ok-Topk in plain NumPy, written from the paper, with messages of exact size.

No capacities, no schedules: what Algorithm 1 computes. It shares no code with
the library.
"""

import numpy as np


def local_topk(acc: np.ndarray, k: int) -> np.ndarray:
    """Topk(acc): the k largest magnitudes, lowest index first among equals; zeros never."""
    order = np.lexsort((np.arange(acc.size), -np.abs(acc.astype(np.float64))))[:k]
    selected = np.zeros(acc.size, bool)
    selected[order] = True
    return selected & (acc != 0)


def ok_topk(selected: list[dict[int, float]], size: int, k: int):
    """Topk(sum_i coo_i) for the selections of P workers.

    Args:
      selected: for each worker its entries, index to value.
      size: n.
      k: entries of the result.

    Returns:
      The total as a dense float64 vector, and for each worker the entries that
      it keeps, index to value.
    """
    total = np.zeros(size, np.float64)
    for entries in selected:
        for index, value in entries.items():
            total[index] += value
    delivered = set(np.flatnonzero(local_topk(total, k)).tolist())
    kept = [
        {index: value for index, value in entries.items() if index not in delivered}
        for entries in selected
    ]
    result = np.zeros(size, np.float64)
    for index in delivered:
        result[index] = total[index]
    return result, kept


def ok_topk_by_owner(total: np.ndarray, owner: np.ndarray, k: int) -> np.ndarray:
    """Topk(total) where equal magnitudes go to the first owners, and there to the lowest indices.

    Args:
      total: ``f[n]``, the sum of the selections.
      owner: ``i[n]``, who owns each index.
      k: entries of the result.
    """
    by_owner = np.concatenate([np.flatnonzero(owner == each) for each in range(owner.max() + 1)])
    chosen = by_owner[local_topk(total[by_owner], k)]
    result = np.zeros_like(total)
    result[chosen] = total[chosen]
    return result


def training_step(accs: np.ndarray, k: int):
    """Topk(sum_i Topk(acc_i)) with its residuals (lines 4 to 6 of Algorithm 2).

    Args:
      accs: ``f[P, n]``.
      k: entries of each selection and of the result.

    Returns:
      The total ``f64[n]`` and the residuals ``[P, n]``.
    """
    selected = []
    for acc in accs:
        indices = np.flatnonzero(local_topk(acc, k))
        selected.append(dict(zip(indices.tolist(), acc[indices].tolist(), strict=True)))
    total, kept = ok_topk(selected, accs.shape[1], k)
    residuals = accs.copy()
    for residual, entries, keeps in zip(residuals, selected, kept, strict=True):
        for index in entries:
            if index not in keeps:
                residual[index] = 0
    return total, residuals


class Published:
    """Algorithm 1 and 2 over many steps, with both thresholds reused for tau' of them.

    Regions, rotation and balancing move entries and change no result, so they are not here.
    """

    def __init__(self, workers: int, size: int, k: int, period: int):
        self.k, self.period, self.t = k, period, 0
        self.residuals = np.zeros((workers, size))
        self.local, self.whole = np.zeros(workers), 0.0
        self.counts: list[tuple[list[int], int]] = []

    def step(self, gradients: np.ndarray) -> np.ndarray:
        """The total; the counts of the workers' selections and of the total are kept."""
        evaluates = self.t % self.period == 0
        self.t += 1
        acc = self.residuals + gradients
        if evaluates:
            self.local = np.array([self._kth(row) for row in acc])
        selected = np.where(np.abs(acc) >= self.local[:, None], acc, 0.0)
        reduced = selected.sum(axis=0)
        if evaluates:
            self.whole = self._kth(reduced)
        delivered = (np.abs(reduced) >= self.whole) & (reduced != 0)
        self.residuals = np.where((selected != 0) & delivered, 0.0, acc)
        self.counts.append(([int(row.sum()) for row in selected != 0], int(delivered.sum())))
        return np.where(delivered, reduced, 0.0)

    def _kth(self, x: np.ndarray) -> float:
        magnitudes = np.sort(np.abs(x))[::-1]
        return float(magnitudes[min(self.k, np.count_nonzero(x)) - 1])
