"""Bits, bit sets, compaction and the largest: how a padded COO buffer is made from n entries."""
