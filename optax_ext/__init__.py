"""Sparse allreduce with error feedback as optax gradient transformations."""

from optax_ext._aliases import gaussian_k, gtopk, ok_topk, ok_topk_sgd, topk_a
from optax_ext._checkpoint import abstract_state, check_metadata, checkpoint_metadata
from optax_ext._dense import dense
from optax_ext._partitioned_norms import lamb, lars, scale_by_trust_ratio
from optax_ext._reshard import consolidate, reshard
from optax_ext._sparse_allreduce import (
    ShardState,
    SparseAllreduceState,
    StepInfo,
    sparse_allreduce,
)
from optax_ext._state import get_info, get_state, init_state, state_specs
from optax_ext._train_step import TrainStep, make_train_step

__all__ = [
    "ShardState",
    "SparseAllreduceState",
    "StepInfo",
    "TrainStep",
    "abstract_state",
    "check_metadata",
    "checkpoint_metadata",
    "consolidate",
    "dense",
    "gaussian_k",
    "get_info",
    "get_state",
    "gtopk",
    "init_state",
    "lamb",
    "lars",
    "make_train_step",
    "ok_topk",
    "ok_topk_sgd",
    "reshard",
    "scale_by_trust_ratio",
    "sparse_allreduce",
    "state_specs",
    "topk_a",
]
