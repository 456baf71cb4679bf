"""The problem of all contestants: shapes of parameters, and gradients instead of a model."""

import functools
import math
from collections.abc import Callable

import numpy as np

# Two dimensions each: rows, columns. PowerSGD compresses these, and no biases.
Matrices = list[tuple[int, int]]
# Different gradients, in turn: with few of them a residual would follow their rhythm.
COUNT = 32
# Entries between the beginnings of two gradients: arrays at multiples of 64 bytes are not
# copied on their way to a device.
_STRIDE = 16


def _vgg(scale: float) -> Matrices:
    """VGG-16 for CIFAR (14.7M entries) with its channels scaled; kernels as matrices."""
    channels = [64, 64, 128, 128, 256, 256, 256, *[512] * 6]
    wide = [max(1, int(c * scale)) for c in channels]
    kernels = [(b, 9 * a) for a, b in zip([3, *wide], wide, strict=False)]
    return [*kernels, (10, wide[-1])]


def _lstm(scale: float) -> Matrices:
    """Five bidirectional layers of an LSTM (27.6M entries at scale 1), and an output layer."""
    hidden = max(1, int(587 * scale))
    return [*[(4 * hidden, hidden)] * 20, (29, hidden)]


def _exactly(matrices: Callable[[float], Matrices], size: int) -> list[tuple[int, ...]]:
    """The largest matrices that fit, with a bias for each row; the rest makes one larger.

    Missing entries become rows of the largest matrix, and the last part of a row joins its bias,
    so that nearly all entries are in the matrices.
    """
    scale = 4 * math.sqrt(size / 14.7e6)
    while _total(matrices(scale)) > size:
        scale *= 0.999
        if scale < 1e-4:
            return [(size,)]
    found = matrices(scale)
    biases = [rows for rows, _ in found]
    missing = size - _total(found)
    largest = max(range(len(found)), key=lambda i: math.prod(found[i]))
    rows, columns = found[largest]
    found[largest] = (rows + missing // columns, columns)
    biases[largest] += missing % columns
    pairs = zip(found, biases, strict=True)
    return [shape for matrix, bias in pairs for shape in (matrix, (bias,))]


def _gpt2(size: int) -> list[tuple[int, ...]]:
    """The 124,439,808 entries of GPT-2 in its leaves; narrower for a smaller n, plus the rest."""
    width = 768
    while sum(map(math.prod, _gpt2_of_width(width))) > size:
        width -= 1
    found = _gpt2_of_width(width) if width else []
    rest = size - sum(map(math.prod, found))
    return [*found, (rest,)] if rest else found


def _gpt2_of_width(d: int) -> list[tuple[int, ...]]:
    block = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *block * 12, (d,), (d,)]


# By name, a function of the number of entries.
SHAPES = {
    "gpt2": _gpt2,
    "vgg": functools.partial(_exactly, _vgg),
    "lstm": functools.partial(_exactly, _lstm),
    "flat": lambda size: [(size,)],
}


def _total(matrices: Matrices) -> int:
    return sum(rows * columns + rows for rows, columns in matrices)


def gradients(shapes: list[tuple[int, ...]], host: int, seed: int) -> list[list[np.ndarray]]:
    """`COUNT` gradients of one worker, float32, heavy-tailed.

    Layers differ in scale, which is the same on all workers, and 20 % of the variance before the
    tails is common to all workers, as in training. The gradients are views of the same numbers,
    each begun a little later, so that they take the memory of one.
    """
    common = np.random.default_rng(seed)
    own = np.random.default_rng([seed, host + 1])
    scales = common.lognormal(0.0, 0.5, len(shapes))
    buffers = [
        _heavy(common, own, math.prod(shape) + _STRIDE * COUNT, scale)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return [
        [
            buffer[_STRIDE * turn :][: math.prod(shape)].reshape(shape)
            for buffer, shape in zip(buffers, shapes, strict=True)
        ]
        for turn in range(COUNT)
    ]


def _heavy(
    common: np.random.Generator, own: np.random.Generator, size: int, scale: float
) -> np.ndarray:
    normal = own.standard_normal(size, np.float32)
    normal *= 2.0
    normal += common.standard_normal(size, np.float32)
    # A buffer that begins at a multiple of 64 bytes.
    room = np.empty(size + _STRIDE, np.float32)
    first = (-room.ctypes.data // room.itemsize) % _STRIDE
    heavy = room[first : first + size]
    np.abs(normal, out=heavy)
    heavy *= normal
    heavy *= np.float32(1e-3 * scale)
    return heavy
