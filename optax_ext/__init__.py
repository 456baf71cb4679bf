"""Sparse and low-rank allreduces with error feedback as optax gradient transformations."""

from optax_ext import contrib, published
from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._residual import Residual
from optax_ext._error_feedback._sparse_state import SparseAllreduceState, StepInfo
from optax_ext._optimizers._adamw import sparse_adamw
from optax_ext._optimizers._local_adam import scale_by_local_adam
from optax_ext._optimizers._ok_topk_sgd import ok_topk_sgd
from optax_ext._optimizers._sgd import sparse_sgd
from optax_ext._optimizers._sparse_optimizer import sparse_optimizer
from optax_ext._state._checkpoint import abstract_state, check_metadata, checkpoint_metadata
from optax_ext._state._consolidate import consolidate
from optax_ext._state._find import get_info, get_state
from optax_ext._state._flush import flush
from optax_ext._state._init import init_state, with_mesh
from optax_ext._state._reshard import reshard
from optax_ext._state._specs import state_specs
from optax_ext._train._ahead import ahead
from optax_ext._train._data_parallel import data_parallel
from optax_ext._train._monitoring import Monitor, metrics
from optax_ext._train._train_round import make_train_round
from optax_ext._train._train_step import make_train_step
from optax_ext._transforms._assertions import assert_local_gradients, assert_replicated_gradients
from optax_ext._transforms._buckets import bucketed
from optax_ext._transforms._delayed import delayed
from optax_ext._transforms._dense import dense
from optax_ext._transforms._local_clip import local_clip_by_global_norm
from optax_ext._transforms._local_steps import local_steps
from optax_ext._transforms._low_rank import acp_sgd, powersgd
from optax_ext._transforms._momentum_correction import momentum_correction
from optax_ext._transforms._multi_steps import multi_steps
from optax_ext._transforms._ok_topk import ok_topk
from optax_ext._transforms._quantized import quantized
from optax_ext._transforms._residual import residual
from optax_ext._transforms._small_leaves import small_leaves
from optax_ext._transforms._sparse_allreduce import sparse_allreduce
from optax_ext._transforms._topk_a import topk_a
from optax_ext._transforms._xi import measure_xi

__all__ = [
    "MomentumCorrection",
    "Monitor",
    "Residual",
    "SparseAllreduceState",
    "StepInfo",
    "abstract_state",
    "acp_sgd",
    "ahead",
    "assert_local_gradients",
    "assert_replicated_gradients",
    "bucketed",
    "check_metadata",
    "checkpoint_metadata",
    "consolidate",
    "contrib",
    "data_parallel",
    "delayed",
    "dense",
    "flush",
    "get_info",
    "get_state",
    "init_state",
    "local_clip_by_global_norm",
    "local_steps",
    "make_train_round",
    "make_train_step",
    "measure_xi",
    "metrics",
    "momentum_correction",
    "multi_steps",
    "ok_topk",
    "ok_topk_sgd",
    "powersgd",
    "published",
    "quantized",
    "reshard",
    "residual",
    "scale_by_local_adam",
    "small_leaves",
    "sparse_adamw",
    "sparse_allreduce",
    "sparse_optimizer",
    "sparse_sgd",
    "state_specs",
    "topk_a",
    "with_mesh",
]
