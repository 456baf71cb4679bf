"""LARS, LAMB, and an operator on layers, whose arithmetic the workers divide; nothing sparse."""

from optax_ext.contrib._distributed import distributed
from optax_ext.contrib._lars_lamb import lamb, lars
from optax_ext.contrib._trust_ratio import scale_by_trust_ratio

__all__ = ["distributed", "lamb", "lars", "scale_by_trust_ratio"]
