"""Allreduces: who sends what to whom, and what of it reaches everyone."""

from sparse_collectives.allreduce._agreed import agreed as agreed
from sparse_collectives.allreduce._complete import complete as complete
from sparse_collectives.allreduce._dense import dense as dense
from sparse_collectives.allreduce._dense_bucketed import dense_bucketed as dense_bucketed
from sparse_collectives.allreduce._dsar_split_allgather import (
    dsar_split_allgather as dsar_split_allgather,
)
from sparse_collectives.allreduce._gtopk import gtopk as gtopk
from sparse_collectives.allreduce._hierarchical import hierarchical as hierarchical
from sparse_collectives.allreduce._leader import leader as leader
from sparse_collectives.allreduce._parts._step import StepState as StepState
from sparse_collectives.allreduce._ring_sparse import ring_sparse as ring_sparse
from sparse_collectives.allreduce._spardl import spardl as spardl
from sparse_collectives.allreduce._sparse_allgather import sparse_allgather as sparse_allgather
from sparse_collectives.allreduce._ssar_recursive_double import (
    ssar_recursive_double as ssar_recursive_double,
)
from sparse_collectives.allreduce._ssar_split_allgather import (
    ssar_split_allgather as ssar_split_allgather,
)
from sparse_collectives.allreduce._topk_a import topk_a as topk_a
from sparse_collectives.allreduce._torus_2d import torus_2d as torus_2d
from sparse_collectives.allreduce.ok_topk import OkTopkState as OkTopkState
from sparse_collectives.allreduce.ok_topk import ok_topk as ok_topk

__all__ = [
    "OkTopkState",
    "StepState",
    "agreed",
    "complete",
    "dense",
    "dense_bucketed",
    "dsar_split_allgather",
    "gtopk",
    "hierarchical",
    "leader",
    "ok_topk",
    "ring_sparse",
    "spardl",
    "sparse_allgather",
    "ssar_recursive_double",
    "ssar_split_allgather",
    "topk_a",
    "torus_2d",
]
