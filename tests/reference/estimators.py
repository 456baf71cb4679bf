"""Estimated thresholds in plain NumPy, in float64. It shares no code with the library."""

import math

import numpy as np

from tests.reference import selection


def _finite(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x[np.isfinite(x)]


def normal_quantile(tail: float) -> float:
    """The z above which a standard normal has the probability ``tail``, at most 1/2."""
    low, high = 0.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        if math.erfc(middle / math.sqrt(2)) / 2 > tail:
            low = middle
        else:
            high = middle
    return low


def gaussian_k(x: np.ndarray, k: int) -> float:
    finite = _finite(x)
    if not finite.size:
        return 0.0
    threshold = abs(finite.mean()) + normal_quantile(k / x.size / 2) * finite.std()
    return min(threshold, np.abs(finite).max())


def lowered(x: np.ndarray, threshold: float, k: int) -> float:
    for _ in range(20):
        if len(selection.passing(x, threshold)) >= 3 * k / 4:
            break
        threshold *= 0.8
    return threshold


def redsync(x: np.ndarray, k: int, rounds: int = 20) -> float:
    finite = np.abs(_finite(x))
    if not finite.size:
        return 0.0
    mean, largest = finite.mean(), finite.max()
    low, high = 0.0, 1.0
    for _ in range(rounds):
        ratio = (low + high) / 2
        count = len(selection.passing(x, mean + ratio * (largest - mean)))
        if count < k:
            high = ratio
        else:
            low = ratio
            if count <= 2 * k:
                break
    return mean + low * (largest - mean)


def sidco(x: np.ndarray, k: int, distribution: str, stages: int) -> float:
    finite = np.abs(_finite(x))
    if not finite.size:
        return 0.0
    densities = [0.25] * (stages - 1) + [k / x.size / 0.25 ** (stages - 1)]
    threshold = 0.0
    for stage, density in enumerate(densities):
        if stage == 0 and distribution == "gamma":
            nonzero = finite[finite > 0]
            s = math.log(nonzero.mean()) - np.log(nonzero).mean()
            shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
            share = min(1.0, density * finite.size / nonzero.size)
            rise = -nonzero.mean() / shape * (math.log(share) + math.lgamma(shape))
        else:
            exceeding = finite[finite >= threshold] - threshold
            mean = exceeding.mean()
            if distribution == "exponential":
                rise = -mean * math.log(density)
            else:
                ratio = mean**2 / exceeding.var()
                shape, scale = (1 - ratio) / 2, mean * (1 + ratio) / 2
                rise = scale / shape * (density**-shape - 1)
        threshold += max(rise, 0.0)
        if not (finite >= threshold).any():
            return finite.max()
    return min(threshold, finite.max())
