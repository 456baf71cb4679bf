"""Selection by layer and by row in plain NumPy, as ADTopk states it."""

import math

import numpy as np

from tests.reference.selection import kth_magnitude, magnitudes, topk


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
    """Algorithm 2 for one layer, in the place of Algorithm 1's TradTopk (section 5).

    With the change of the threshold tested in line 5, and its own turns counted in line 7.
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
