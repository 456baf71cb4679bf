"""Sparse allreduce with error feedback as optax gradient transformations."""

from optax_ext._aliases import gtopk, hitopk, ok_topk, ok_topk_sgd, quantized_topk, topk_a, topk_dsa
from optax_ext._loop._monitoring import Monitor, metrics, tensorboard_writer
from optax_ext._loop._train_step import TrainStep, make_train_step
from optax_ext._loop._watchdog import Watchdog
from optax_ext._selector_aliases import (
    adtopk,
    adtopk_interleaved,
    adtopk_threshold,
    dgc,
    gaussian_k,
    mstopk,
    redsync,
    sidco,
)
from optax_ext._state._checkpoint import abstract_state, check_metadata, checkpoint_metadata
from optax_ext._state._checksums import check_checksums, checksums
from optax_ext._state._consolidate import consolidate
from optax_ext._state._find import get_info, get_state, get_states, init_state, state_specs
from optax_ext._state._reshard import reshard
from optax_ext._state._wrappers import MultiStepsState
from optax_ext._step._dense import dense
from optax_ext._step._dense_leaves import small_leaves
from optax_ext._step._density_schedule import exponential_density, staged_density, strict_density
from optax_ext._step._momentum_correction import MomentumCorrection, momentum_correction
from optax_ext._step._sparse_allreduce import sparse_allreduce
from optax_ext._step._sparse_state import ShardState, SparseAllreduceState, StepInfo
from optax_ext._transforms._buckets import BucketedState, bucketed
from optax_ext._transforms._local_clip import local_clip_by_global_norm
from optax_ext._transforms._multi_steps import multi_steps
from optax_ext._transforms._partitioned_norms import lamb, lars, scale_by_trust_ratio

__all__ = [
    "BucketedState",
    "MomentumCorrection",
    "Monitor",
    "MultiStepsState",
    "ShardState",
    "SparseAllreduceState",
    "StepInfo",
    "TrainStep",
    "Watchdog",
    "abstract_state",
    "adtopk",
    "adtopk_interleaved",
    "adtopk_threshold",
    "bucketed",
    "check_checksums",
    "check_metadata",
    "checkpoint_metadata",
    "checksums",
    "consolidate",
    "dense",
    "dgc",
    "exponential_density",
    "gaussian_k",
    "get_info",
    "get_state",
    "get_states",
    "gtopk",
    "hitopk",
    "init_state",
    "lamb",
    "lars",
    "local_clip_by_global_norm",
    "make_train_step",
    "metrics",
    "momentum_correction",
    "mstopk",
    "multi_steps",
    "ok_topk",
    "ok_topk_sgd",
    "quantized_topk",
    "redsync",
    "reshard",
    "scale_by_trust_ratio",
    "sidco",
    "small_leaves",
    "sparse_allreduce",
    "staged_density",
    "state_specs",
    "strict_density",
    "tensorboard_writer",
    "topk_a",
    "topk_dsa",
]
