"""Selection in plain NumPy, as the papers state it, and vectors on which it goes wrong.

Magnitudes are compared as float64, which holds every float32, bfloat16 and
float16 exactly, subnormals included. NaN counts as larger than infinity, all
NaN as equal. It shares no code with the library.
"""

import math

import numpy as np

from tests.reference import windows


def magnitudes(x: np.ndarray) -> np.ndarray:
    """``|x|`` as float64, without rounding."""
    return np.abs(x.astype(np.float64))


def kth_magnitude(x: np.ndarray, k: int) -> float:
    """The k-th largest magnitude; 0 if fewer than k entries are nonzero."""
    # partition puts NaN last, that is, above infinity.
    return float(np.partition(magnitudes(x), x.size - k)[x.size - k])


def topk(x: np.ndarray, k: int) -> np.ndarray:
    """The ascending indices of the k largest magnitudes.

    Lowest index first among equals; zeros never.
    """
    magnitude = magnitudes(x)
    nan = np.isnan(magnitude)
    order = np.lexsort((np.arange(x.size), -np.where(nan, 0, magnitude), ~nan))[:k]
    return np.sort(order[magnitude[order] != 0])


def passing(x: np.ndarray, threshold: float) -> np.ndarray:
    """The ascending indices whose magnitude reaches ``threshold``; zeros never."""
    magnitude = magnitudes(x)
    nan = np.isnan(magnitude)
    reached = nan if np.isnan(threshold) else nan | (magnitude >= threshold)
    return np.flatnonzero(reached & (magnitude != 0))


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


# By layer and by row, as ADTopk states it.


def count(density: float, size: int) -> int:
    return min(size, max(1, round(density * size)))


def slices(shapes):
    """The shape and the place of each layer with entries in the flat buffer."""
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        if size:
            yield shape, slice(start, start + size)
        start += size


def rows(shape, row_axis: int) -> list[np.ndarray]:
    """For each row of a layer, the places of its entries in the layer."""
    places = np.arange(math.prod(shape)).reshape(shape)
    if len(shape) < 2:
        return [places.ravel()]
    return list(np.moveaxis(places, row_axis, 0).reshape(shape[row_axis], -1))


def of_rows(layer: np.ndarray, shape, density: float, row_axis: int) -> np.ndarray:
    chosen = [
        row[topk(layer[row], count(density, len(row)))] for row in rows(shape, row_axis) if len(row)
    ]
    return np.sort(np.concatenate(chosen))


def of_layer(layer: np.ndarray, density: float) -> np.ndarray:
    return topk(layer, count(density, layer.size))


def adtopk(x: np.ndarray, shapes, density: float, row_axis: int = -1) -> np.ndarray:
    return np.concatenate(
        [at.start + of_rows(x[at], shape, density, row_axis) for shape, at in slices(shapes)]
    )


def layerwise_topk(x: np.ndarray, shapes, density: float) -> np.ndarray:
    return np.concatenate([at.start + of_layer(x[at], density) for _, at in slices(shapes)])


class ThresholdLayer:
    """Algorithm 2 for one layer, instead of Algorithm 1's TradTopk (section 5).

    Line 5 tests the change of the threshold, and line 7 counts its own turns.
    """

    def __init__(self, shape, density, steps, warmup, period):
        self.shape, self.density, self.steps = shape, density, steps
        self.warmup, self.period = warmup, period
        self.t, self.threshold, self.steady = 0, 0.0, False
        self.branches = []

    def step(self, layer: np.ndarray) -> np.ndarray:
        self.t += 1
        if self.t % 2:
            self.branches.append("interleaved rows")
            return of_rows(layer, self.shape, self.density, -1)
        if self.t < self.warmup:
            self.branches.append("layer")
            self.threshold = kth_magnitude(layer, count(self.density, layer.size))
            return of_layer(layer, self.density)
        if self.t > self.steps * 3 / 4 and self.steady:
            self.branches.append("rows")
            return of_rows(layer, self.shape, self.density, -1)
        if (self.t // 2 - 1) % self.period == 0:
            self.branches.append("evaluate")
            threshold = kth_magnitude(layer, count(self.density, layer.size))
            epsilon = threshold / 10
            change = abs(threshold - self.threshold)
            self.steady = change < epsilon
            if self.steady:
                self.period += 1
            elif change > 2 * epsilon:
                self.period = max(1, self.period - 1)
            self.threshold = threshold
            return of_layer(layer, self.density)
        self.branches.append("reuse")
        return np.flatnonzero(magnitudes(layer) > self.threshold)


# Hard vectors.


def _normal(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.standard_normal(size).astype(np.float32)


def _one_nonzero(rng: np.random.Generator, size: int) -> np.ndarray:
    x = np.zeros(size, np.float32)
    x[rng.integers(size)] = -2.5
    return x


def _signed_zeros(rng: np.random.Generator, size: int) -> np.ndarray:
    x = np.copysign(np.zeros(size, np.float32), _normal(rng, size))
    x[rng.random(size) < 0.001] = 1e-3
    return x


def _neighbors(rng: np.random.Generator, size: int) -> np.ndarray:
    """1, 1 + eps, 1 + 2 eps, and so on, in any order."""
    return (np.int32(0x3F800000) + rng.permutation(size).astype(np.int32)).view(np.float32)


def _not_finite(rng: np.random.Generator, size: int) -> np.ndarray:
    x = _normal(rng, size)
    x[rng.random(size) < 0.004] = np.nan
    x[rng.random(size) < 0.003] = np.inf
    x[rng.random(size) < 0.003] = -np.inf
    return x


_HARD = {
    "normal": _normal,
    "small integers": lambda rng, size: rng.integers(-3, 4, size),
    "ties at the top": lambda rng, size: np.where(rng.random(size) < 0.6, -7, _normal(rng, size)),
    "all equal": lambda rng, size: np.full(size, -0.75),
    "all zero": lambda rng, size: np.zeros(size),
    "one nonzero": _one_nonzero,
    "half zeros": lambda rng, size: np.where(rng.random(size) < 0.5, _normal(rng, size), 0),
    "few nonzeros": lambda rng, size: np.where(rng.random(size) < 0.003, _normal(rng, size), 0),
    "signed zeros": _signed_zeros,
    "subnormal": lambda rng, size: _normal(rng, size) * 1e-40,
    "smallest subnormals": lambda rng, size: rng.integers(-3, 4, size) * 2.0**-149,
    "all magnitudes": lambda rng, size: np.ldexp(_normal(rng, size), rng.integers(-149, 126, size)),
    "heavy tail": lambda rng, size: rng.standard_cauchy(size),
    "neighbors": _neighbors,
    "ascending": lambda rng, size: np.sort(np.abs(_normal(rng, size))),
    "descending": lambda rng, size: -np.sort(np.abs(_normal(rng, size)))[::-1],
    "large at the end": lambda rng, size: (
        _normal(rng, size) * np.where(np.arange(size) < size - size // 8, 1e-3, 1)
    ),
    "not finite": _not_finite,
    "all NaN": lambda rng, size: np.full(size, np.nan),
    "all infinite": lambda rng, size: np.full(size, -np.inf),
}
HARD_NAMES = tuple(_HARD)


def hard_vector(name: str, size: int, seed: int = 0) -> np.ndarray:
    """A vector on which selections go wrong, ``f32[size]``."""
    return np.asarray(_HARD[name](np.random.default_rng(seed), size), np.float32)


def hard_vectors(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """All of them, by name."""
    return {name: hard_vector(name, size, seed) for name in HARD_NAMES}
