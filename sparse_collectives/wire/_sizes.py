"""The number of words of a message, in plain Python, for the codecs and for the cost model."""

import bisect
from collections.abc import Callable
from typing import NamedTuple

from sparse_collectives._sparse_ops import _elias_fano
from sparse_collectives.wire._gaps import GapFormat

# 65,535 is an escape; one escape with 16 bits reaches every index.
GAPS16 = GapFormat(base=65535, digit_bits=16, digits=1)
# 253 to 255 are escapes; three escapes with 8 bits each reach every index.
GAPS8 = GapFormat(base=253, digit_bits=8, digits=3)
# By the bits of a code: the remaining codes hold the digits of escapes, and one is a mark.
GAPS_OF_BITS = {
    8: GapFormat(base=191, digit_bits=6, digits=4),
    12: GapFormat(base=3071, digit_bits=10, digits=2),
}
# Default room for escapes, as a share of the entries.
ESCAPES16 = 1 / 16
ESCAPES8 = 1 / 8
ESCAPES12 = 1 / 16
BLOCK = 128
BUCKET = 512


def raw_pairs(slots: int) -> int:
    """A word for the value and one for the index."""
    return 2 * slots


def elias_fano_pairs(slots: int, size: int) -> int:
    """A word for the value, and the indices of a set."""
    return slots + _elias_fano.words(slots, size)


def bf16_dense(length: int) -> int:
    """Two values to a word."""
    return -(-length // 2)


def bf16_pairs(slots: int) -> int:
    """The values, then one word for each index."""
    return slots + bf16_dense(slots)


def narrow16_slots(entries: int, size: int, escapes: float) -> int:
    """Slots of a row of so many entries of a vector of length ``size``, escapes included."""
    entries = max(1, entries)
    return entries + GAPS16.escape_slots(entries, size, escapes)


def narrow16_pairs(entries: int, size: int, escapes: float = ESCAPES16) -> int:
    """The first index, and a word for each slot."""
    return 1 + narrow16_slots(entries, size, escapes)


def block_scales(length: int, block: int) -> int:
    """One word for each block of values."""
    return -(-length // block)


def narrow8_slots(entries: int, size: int, escapes: float) -> int:
    """Slots of a row of so many entries, escapes included; an even number."""
    entries = max(1, entries)
    slots = entries + GAPS8.escape_slots(entries, size, escapes)
    return slots + slots % 2


def narrow8_pairs(entries: int, size: int, escapes: float = ESCAPES8, block: int = BLOCK) -> int:
    """The first index, the scales, and two slots to a word."""
    slots = narrow8_slots(entries, size, escapes)
    return 1 + block_scales(slots, block) + slots // 2


def narrow8_dense(length: int, block: int = BLOCK) -> int:
    """The scales, and four values to a word."""
    return block_scales(length, block) + -(-length // 4)


def two_bits_slots(entries: int, escapes: float) -> int:
    """Slots of a row of so many entries, escapes included; a multiple of 16."""
    slots = max(1, entries) + round(escapes * entries) + 8
    return slots + -slots % 16


def two_bits_words(slots: int, gap_bits: int, block: int) -> int:
    """The first index, the levels of the blocks, the codes of 16 slots each, and their values."""
    return 1 + block_scales(slots, block) + -(-slots // 16) * (gap_bits + 2) // 2


def qsgd_dense(length: int, bits: int = 8, bucket: int = BUCKET) -> int:
    """A scale for each bucket, and the codes."""
    return block_scales(length, bucket) + -(-length * bits // 32)


def qsgd_pairs(slots: int, bits: int = 8, bucket: int = BUCKET) -> int:
    """One word for each index, then the values as a dense run."""
    return slots + qsgd_dense(slots, bits, bucket)


def slots_of(words: int, words_for: Callable[[int], int]) -> int:
    """How many slots a message of ``words`` words has.

    Args:
      words: the words of one message.
      words_for: the words for a number of slots; strictly increasing.

    Raises:
      ValueError: no number of slots takes so many words.
    """
    slots = bisect.bisect_left(range(32 * words + 1), words, key=words_for)
    if words_for(slots) != words:
        raise ValueError(
            f"message has {words} words in a row, which this codec never makes. Decode it with the "
            "codec, and the options, that encoded it."
        )
    return slots


class MessageSizes(NamedTuple):
    """The sizes of a codec with its default options, for 32-bit values.

    Attributes:
      pairs: ``pairs(slots, size)``: words of a message of value-index pairs.
      dense: ``dense(length)``: words of a message of dense values.
      gaps: how gaps between indices are written, or None if indices are sent unchanged.
      escapes: room for escapes as a share of the slots; 0 without ``gaps``.
      exact: whether nothing is rounded.
    """

    pairs: Callable[[int, int], int]
    dense: Callable[[int], int]
    gaps: GapFormat | None = None
    escapes: float = 0.0
    exact: bool = False


# By the name of the factory.
SIZES: dict[str, MessageSizes] = {
    "raw": MessageSizes(lambda slots, size: raw_pairs(slots), lambda length: length, exact=True),
    "elias_fano": MessageSizes(elias_fano_pairs, lambda length: length, exact=True),
    "bf16": MessageSizes(lambda slots, size: bf16_pairs(slots), bf16_dense),
    "narrow16": MessageSizes(narrow16_pairs, bf16_dense, GAPS16, ESCAPES16),
    "narrow8": MessageSizes(narrow8_pairs, narrow8_dense, GAPS8, ESCAPES8),
    "two_bits": MessageSizes(
        lambda slots, size: two_bits_words(two_bits_slots(slots, ESCAPES12), 12, BLOCK),
        narrow8_dense,
        GAPS_OF_BITS[12],
        ESCAPES12,
    ),
    "qsgd": MessageSizes(lambda slots, size: qsgd_pairs(slots), qsgd_dense),
}
