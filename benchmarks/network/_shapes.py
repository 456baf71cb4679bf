"""Parameter shapes with a given number of entries, the same for all contestants."""

import math
from collections.abc import Callable

# Two dimensions each: rows, columns. PowerSGD compresses these, and no biases.
Matrices = list[tuple[int, int]]


def vgg(size: int) -> list[tuple[int, ...]]:
    """VGG-16 for CIFAR (14.7M entries) with its channels scaled; kernels as matrices."""

    def matrices(scale: float) -> Matrices:
        channels = [64, 64, 128, 128, 256, 256, 256, *[512] * 6]
        wide = [max(1, int(c * scale)) for c in channels]
        kernels = [(b, 9 * a) for a, b in zip([3, *wide], wide, strict=False)]
        return [*kernels, (10, wide[-1])]

    return _exactly(size, matrices)


def lstm(size: int) -> list[tuple[int, ...]]:
    """Five bidirectional layers of an LSTM (27.6M entries at scale 1), and an output layer."""

    def matrices(scale: float) -> Matrices:
        hidden = max(1, int(587 * scale))
        return [*[(4 * hidden, hidden)] * 20, (29, hidden)]

    return _exactly(size, matrices)


def flat(size: int) -> list[tuple[int, ...]]:
    """One vector."""
    return [(size,)]


SHAPES = {"vgg": vgg, "lstm": lstm, "flat": flat}


def _exactly(size: int, matrices: Callable[[float], Matrices]) -> list[tuple[int, ...]]:
    """The largest matrices that fit, with a bias for each row; the rest makes one larger.

    What is missing becomes rows of the largest matrix, and at the end a part of a row
    joins its bias, so that next to nothing is left out of the matrices.
    """
    scale = 4 * math.sqrt(size / 14.7e6)
    while _total(matrices(scale)) > size:
        scale *= 0.999
        if scale < 1e-4:
            return flat(size)
    found = matrices(scale)
    biases = [rows for rows, _ in found]
    missing = size - _total(found)
    largest = max(range(len(found)), key=lambda i: math.prod(found[i]))
    rows, columns = found[largest]
    found[largest] = (rows + missing // columns, columns)
    biases[largest] += missing % columns
    return [
        shape for matrix, bias in zip(found, biases, strict=True) for shape in (matrix, (bias,))
    ]


def _total(matrices: Matrices) -> int:
    return sum(rows * columns + rows for rows, columns in matrices)
