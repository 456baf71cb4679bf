"""Selectors: they choose the entries of its accumulator that a worker sends.

:mod:`~sparse_collectives.select.published` has the other selectors of the papers.
"""

from sparse_collectives.select import published
from sparse_collectives.select._bucketed import bucketed
from sparse_collectives.select._density import exponential_density, staged_density, strict_density
from sparse_collectives.select._layerwise import layerwise
from sparse_collectives.select._random_k import random_k
from sparse_collectives.select._scheduled import scheduled
from sparse_collectives.select._threshold import threshold
from sparse_collectives.select._threshold_reuse import threshold_reuse
from sparse_collectives.select._topk import topk

__all__ = [
    "bucketed",
    "exponential_density",
    "layerwise",
    "published",
    "random_k",
    "scheduled",
    "staged_density",
    "strict_density",
    "threshold",
    "threshold_reuse",
    "topk",
]
