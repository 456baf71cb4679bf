"""How value-index pairs are encoded for an exchange."""

from sparse_collectives.wire._bf16 import bf16 as bf16
from sparse_collectives.wire._narrow8 import narrow8 as narrow8
from sparse_collectives.wire._narrow16 import narrow16 as narrow16
from sparse_collectives.wire._qsgd import qsgd as qsgd
from sparse_collectives.wire._raw import raw as raw
from sparse_collectives.wire._without_feedback import without_feedback as without_feedback

__all__ = ["bf16", "narrow16", "narrow8", "qsgd", "raw", "without_feedback"]
