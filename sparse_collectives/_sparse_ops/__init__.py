"""Bits, bit sets, compaction and the k largest, from which a padded COO buffer is made."""

from sparse_collectives._sparse_ops._bits import all_below, sum_of
from sparse_collectives._sparse_ops._bitset import to_dense

# The parts that `optax_ext` uses.
__all__ = ["all_below", "sum_of", "to_dense"]
