"""Allreduces of papers, under the same contract, that another one of this library outperforms.

With them the papers' systems can be run and compared. docs/allreduces.md says what each of them
is still used for.
"""

from sparse_collectives.allreduce._dense import dense_bucketed, torus_2d
from sparse_collectives.allreduce.published._dsar_split_allgather import dsar_split_allgather
from sparse_collectives.allreduce.published._gtopk import gtopk
from sparse_collectives.allreduce.published._ring_sparse import ring_sparse
from sparse_collectives.allreduce.published._sparse_allgather import sparse_allgather
from sparse_collectives.allreduce.published._ssar_recursive_double import ssar_recursive_double
from sparse_collectives.allreduce.published._ssar_split_allgather import ssar_split_allgather

__all__ = [
    "dense_bucketed",
    "dsar_split_allgather",
    "gtopk",
    "ring_sparse",
    "sparse_allgather",
    "ssar_recursive_double",
    "ssar_split_allgather",
    "torus_2d",
]
