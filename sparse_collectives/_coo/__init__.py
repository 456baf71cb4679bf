"""Bits, bit sets, compaction and the largest: how a padded COO buffer is made from n entries."""

from sparse_collectives._coo._bits import all_below

# What `optax_ext` uses besides.
__all__ = ["all_below"]
