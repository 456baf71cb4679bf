"""Codecs: how value-index pairs are encoded for an exchange."""

from sparse_collectives.wire._bf16 import bf16
from sparse_collectives.wire._elias_fano import elias_fano
from sparse_collectives.wire._narrow8 import narrow8
from sparse_collectives.wire._narrow16 import narrow16
from sparse_collectives.wire._qsgd import qsgd
from sparse_collectives.wire._raw import raw
from sparse_collectives.wire._two_bits import two_bits
from sparse_collectives.wire._without_feedback import without_feedback

__all__ = [
    "bf16",
    "elias_fano",
    "narrow16",
    "narrow8",
    "qsgd",
    "raw",
    "two_bits",
    "without_feedback",
]
