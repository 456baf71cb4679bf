"""Allreduces: who sends what to whom, and what of it reaches everyone."""

from sparse_collectives.allreduce._auto import AutoChoice as AutoChoice
from sparse_collectives.allreduce._auto import auto as auto
from sparse_collectives.allreduce._auto import explain_auto as explain_auto
from sparse_collectives.allreduce._dense import dense as dense
from sparse_collectives.allreduce._dsar_split_allgather import (
    dsar_split_allgather as dsar_split_allgather,
)
from sparse_collectives.allreduce._ring_sparse import ring_sparse as ring_sparse
from sparse_collectives.allreduce._ssar_recursive_double import (
    ssar_recursive_double as ssar_recursive_double,
)
from sparse_collectives.allreduce._ssar_split_allgather import (
    ssar_split_allgather as ssar_split_allgather,
)
from sparse_collectives.allreduce._step import StepState as StepState
from sparse_collectives.allreduce.ok_topk import OkTopkState as OkTopkState
from sparse_collectives.allreduce.ok_topk import ok_topk as ok_topk

__all__ = [
    "AutoChoice",
    "OkTopkState",
    "StepState",
    "auto",
    "dense",
    "dsar_split_allgather",
    "explain_auto",
    "ok_topk",
    "ring_sparse",
    "ssar_recursive_double",
    "ssar_split_allgather",
]
