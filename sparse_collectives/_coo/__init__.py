"""Bits, bit sets and compaction: how a padded COO buffer is made from n entries."""
