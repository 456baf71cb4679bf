"""Gradients that are given, so that no model is computed."""

import math

import numpy as np

# So many different ones, in turn: with few of them a residual would follow their rhythm.
COUNT = 32
# Entries between the beginnings of two gradients: arrays at multiples of 64 bytes are not
# copied on their way to a device.
_STRIDE = 16


def gradients(shapes: list[tuple[int, ...]], host: int, seed: int) -> list[list[np.ndarray]]:
    """`COUNT` gradients of one worker, float32, heavy-tailed.

    Layers differ in scale, workers agree on that, and a fifth of the variance before the
    tails is common to all workers, as in training. The gradients are views of the same
    numbers, each begun a little later, so that they take the memory of one.
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
    heavy = _aligned(size)
    np.abs(normal, out=heavy)
    heavy *= normal
    heavy *= np.float32(1e-3 * scale)
    return heavy


def _aligned(size: int) -> np.ndarray:
    """Room for float32 entries that begins at a multiple of 64 bytes."""
    room = np.empty(size + _STRIDE, np.float32)
    first = (-room.ctypes.data // room.itemsize) % _STRIDE
    return room[first : first + size]
