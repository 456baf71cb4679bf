"""More selectors in plain NumPy, as their papers state them.

Magnitudes are float64, NaN is above infinity; no code is shared with the library.
"""

import math

import numpy as np

from tests.reference import windows
from tests.reference.selection import magnitudes, passing, topk


def threshold(x: np.ndarray, magnitude: float, capacity: int, step: int) -> np.ndarray:
    """All that reaches a magnitude, or as many as there are slots."""
    return windows.window(passing(x, float(np.float32(magnitude))), capacity, step)


def bucketed(x: np.ndarray, density: float, bucket: int) -> np.ndarray:
    """The top-k of each bucket of consecutive entries."""
    chosen = []
    for start in range(0, x.size, bucket):
        part = x[start : start + bucket]
        chosen.append(start + topk(part, max(1, round(density * part.size))))
    return np.concatenate(chosen)


def mstopk(x: np.ndarray, k: int, samplings: int, step: int) -> np.ndarray:
    """Algorithm 1 of MSTopK, mean and maximum over the finite entries."""
    a = magnitudes(x)
    beyond = ~np.isfinite(a)
    a[beyond] = 0
    mean, u = a.sum() / a.size, a.max()
    a[beyond] = np.inf
    left, right, k1, k2 = 0.0, 1.0, 0, len(a)
    threshold1, threshold2 = np.inf, 0.0
    for _ in range(samplings):
        ratio = left + (right - left) / 2
        middle = mean + ratio * (u - mean)
        nnz = np.count_nonzero((a >= middle) & (a > 0))
        if nnz <= k:
            right = ratio
            if nnz > k1:
                k1, threshold1 = nnz, middle
        else:
            left = ratio
            if nnz < k2:
                k2, threshold2 = nnz, middle
    if math.isinf(threshold1) and beyond.sum() > k:
        return windows.window(np.flatnonzero(beyond), k, step)
    above = (a >= threshold1) & (a > 0)
    within = np.flatnonzero(~above & (a >= threshold2) & (a > 0))
    return np.sort(np.r_[np.flatnonzero(above), windows.window(within, k - above.sum(), step)])


def chi_square(counts: np.ndarray) -> float:
    """Pearson's statistic of equally likely cells, in standard deviations from its mean."""
    expected = counts.mean()
    freedom = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom))
