"""Selectors: which entries of the accumulator a worker sends.

:mod:`~sparse_collectives.select.published` has the others of the papers.
"""

from sparse_collectives.select import published as published
from sparse_collectives.select._bucketed import bucketed as bucketed
from sparse_collectives.select._density import DensitySchedule as DensitySchedule
from sparse_collectives.select._density import exponential_density as exponential_density
from sparse_collectives.select._density import staged_density as staged_density
from sparse_collectives.select._density import strict_density as strict_density
from sparse_collectives.select._layerwise import layerwise as layerwise
from sparse_collectives.select._random_k import random_k as random_k
from sparse_collectives.select._scheduled import scheduled as scheduled
from sparse_collectives.select._threshold import threshold as threshold
from sparse_collectives.select._threshold_reuse import threshold_reuse as threshold_reuse
from sparse_collectives.select._topk import topk as topk

__all__ = [
    "DensitySchedule",
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
