"""Codes of few bits with scales of blocks, in NumPy, with loops."""

import numpy as np


def to_bfloat16(x):
    """The nearest bfloat16, to even, as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits.astype(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def sum_without_outliers(magnitudes, slots):
    """The sum, in which no group counts for more than a multiple of the mean group before."""
    groups = np.array([magnitudes[i::32].sum() for i in range(min(32, len(magnitudes)))])
    most = min(4, max(1.25, slots / 4))
    found = groups.sum()
    for _ in range(100):
        following = np.minimum(groups, most * found / len(groups)).sum()
        if following >= 0.9999 * found:
            break
        found = following
    return found


def arrives(values, bits, block=256):
    """What codes of ``f32[c]`` stand for."""
    values = np.asarray(values, np.float64)
    out = np.zeros(len(values), np.float32)
    for start in range(0, len(values), block):
        part = values[start : start + block]
        magnitude = np.abs(part)
        total = sum_without_outliers(magnitude, len(values))
        mean = total / len(part)
        at = np.arange(start, start + len(part))
        sign = np.where((part < 0) | ((part == 0) & (at % 2 == 1)), -1.0, 1.0)
        if bits == 1:
            found = sign * to_bfloat16(mean)
        elif bits == 2:
            high = magnitude > mean
            low = magnitude[~high].sum()
            above = max(mean, (total - low) / max(high.sum(), 1))
            low /= max((~high).sum(), 1)
            found = sign * np.where(high, to_bfloat16(above), to_bfloat16(low))
        else:
            most = 2 ** (bits - 1) - 1
            step = to_bfloat16(min(4 * mean, magnitude.max()) / most)
            levels = [*(step * np.arange(most)), to_bfloat16(magnitude.max())]
            found = np.sign(part) * [min(levels, key=lambda x: abs(x - m)) for m in magnitude]
        out[at] = found
    return out
