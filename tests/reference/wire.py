"""Decoders of the lossy formats in plain Python, slot by slot, from their description.

They share no code with the library. Each takes one row of words.
"""

import numpy as np


def _unsigned(words):
    return [int(word) & 0xFFFFFFFF for word in np.asarray(words)]


def _float(pattern):
    return np.uint32(pattern).view(np.float32)


def bf16(words, size):
    """Entries as (index, value): values two to a word, then the indices."""
    words = _unsigned(words)
    slots = max(c for c in range(len(words) + 1) if c + -(-c // 2) == len(words))
    values, indices = words[: len(words) - slots], words[len(words) - slots :]
    entries = []
    for slot, index in enumerate(indices):
        half = (values[slot // 2] >> (16 * (slot % 2))) & 0xFFFF
        if index < size:
            entries.append((index, _float(half << 16)))
    return entries


def narrow16(words, size):
    """The first index, then value and gap in one word; a gap of 65,535 is an escape."""
    del size
    position, *words = _unsigned(words)
    entries = []
    for word in words:
        upper, lower = word >> 16, word & 0xFFFF
        if lower == 0xFFFF:
            position += 65535 * upper
        else:
            position += lower
            entries.append((position % 2**31, _float(upper << 16)))
    return entries


def level8(byte, low, high):
    """A sign and a level between two bit patterns, given by their upper halves."""
    code, sign = byte % 128, -1 if byte >= 128 else 1
    if code == 0:
        return sign * np.float32(0)
    if code == 127:
        return np.float32(np.nan)
    pattern = (low << 16) + (code - 1) * 525 * (high - low)
    return sign * _float(min(pattern, 0x7F7FFFFF))


def narrow8(words, size, block=128):
    """The first index, the scales of the blocks, and slots of 8 and 8 bits."""
    del size
    position, *words = _unsigned(words)
    pairs = max(p for p in range(len(words) + 1) if p + -(-2 * p // block) == len(words))
    scales, words = words[: len(words) - pairs], words[len(words) - pairs :]
    slots = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    entries = []
    for slot, half in enumerate(slots):
        byte, code = half >> 8, half & 0xFF
        if code >= 253:
            position += (byte << (8 * (code - 253))) * 253
        else:
            position += code
            scale = scales[slot // block]
            entries.append((position % 2**31, level8(byte, scale >> 16, scale & 0xFFFF)))
    return entries


def two_bits(words, size, gap_bits=12, block=128):
    """The first index, two levels of each block, codes in one or two parts, values of 2 bits."""
    del size
    position, *words = _unsigned(words)
    each = (gap_bits + 2) // 2
    slots = next(
        16 * s for s in range(len(words) + 1) if each * s + -(-16 * s // block) == len(words)
    )
    parts = {}
    for name, bits in {"level": 0, "low": 8, "high": gap_bits - 8, "value": 2}.items():
        count = slots * bits // 32 if bits or name == "high" else -(-slots // block)
        parts[name], words = words[:count], words[count:]

    def field(name, bits, slot):
        return (parts[name][slot * bits // 32] >> (slot * bits % 32)) & (2**bits - 1)

    digit_bits = gap_bits - 2
    mark = 2**gap_bits - 1
    base = mark - 2**digit_bits
    entries, is_marked = [], False
    for slot in range(slots):
        code = field("low", 8, slot)
        if gap_bits == 12:
            code += field("high", 4, slot) << 8
        value = field("value", 2, slot)
        if code == mark:
            is_marked = True
        elif code >= base:
            position += ((code - base) << (digit_bits * value)) * base
        else:
            position += code
            levels = parts["level"][slot // block]
            level = levels & 0xFFFF0000 if value % 2 else (levels & 0xFFFF) << 16
            number = np.float32(np.nan) if is_marked else _float(level) * (-1 if value > 1 else 1)
            entries.append((position % 2**31, np.float32(number)))
            is_marked = False
    return entries


def dense8(words, length, block=128):
    words = _unsigned(words)
    scales, words = words[: -(-length // block)], words[-(-length // block) :]
    values = []
    for place in range(length):
        byte = (words[place // 4] >> (8 * (place % 4))) & 0xFF
        scale = scales[place // block]
        values.append(level8(byte, scale >> 16, scale & 0xFFFF))
    return values


def dense_qsgd(words, length, bits, bucket):
    """One step of each bucket as float32, then signed levels of a few bits."""
    words, levels = _unsigned(words), 2 ** (bits - 1) - 1
    units, words = words[: -(-length // bucket)], words[-(-length // bucket) :]
    each = 32 // bits
    values = []
    for place in range(length):
        code = (words[place // each] >> (bits * (place % each))) & (2**bits - 1)
        if code == 2 * levels + 1:
            values.append(np.float32(np.nan))
        else:
            values.append(np.float32(code - levels) * _float(units[place // bucket]))
    return values


def qsgd(words, size, bits, bucket):
    """The indices, then their values as a dense run."""
    slots = max(
        c for c in range(len(words) + 1) if c + -(-c // bucket) + -(-c * bits // 32) == len(words)
    )
    values = dense_qsgd(words[slots:], slots, bits, bucket)
    indices = [int(index) for index in np.asarray(words[:slots])]
    return [(i, v) for i, v in zip(indices, values, strict=True) if i < size]
