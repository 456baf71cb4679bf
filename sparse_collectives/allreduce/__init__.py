"""Allreduces: each exchanges the selections of the workers and delivers one total to all.

:mod:`~sparse_collectives.allreduce.published` has further allreduces, from papers.
"""

from sparse_collectives.allreduce import published
from sparse_collectives.allreduce._dense import dense
from sparse_collectives.allreduce._full_sums import full_sums
from sparse_collectives.allreduce._hierarchical import hierarchical
from sparse_collectives.allreduce._ok_topk import ok_topk
from sparse_collectives.allreduce._partitioned_topk import partitioned_topk
from sparse_collectives.allreduce._row_topk import row_topk
from sparse_collectives.allreduce._shared_random import shared_random
from sparse_collectives.allreduce._spardl import spardl
from sparse_collectives.allreduce._topk_a import topk_a

__all__ = [
    "dense",
    "full_sums",
    "hierarchical",
    "ok_topk",
    "partitioned_topk",
    "published",
    "row_topk",
    "shared_random",
    "spardl",
    "topk_a",
]
