"""Sparse allreduce with error feedback as optax gradient transformations."""

from optax_ext._aliases import ok_topk, ok_topk_sgd
from optax_ext._dense import dense
from optax_ext._sparse_allreduce import SparseAllreduceState, StepInfo, sparse_allreduce
from optax_ext._state import get_info, get_state, init_state, state_specs
from optax_ext._train_step import TrainStep, make_train_step

__all__ = [
    "SparseAllreduceState",
    "StepInfo",
    "TrainStep",
    "dense",
    "get_info",
    "get_state",
    "init_state",
    "make_train_step",
    "ok_topk",
    "ok_topk_sgd",
    "sparse_allreduce",
    "state_specs",
]
