"""Allreduces: who sends what to whom, and what of it reaches everyone."""

from sparse_collectives.allreduce._auto import AutoChoice as AutoChoice
from sparse_collectives.allreduce._auto import auto as auto
from sparse_collectives.allreduce._auto import explain_auto as explain_auto
from sparse_collectives.allreduce._dense import dense as dense
from sparse_collectives.allreduce.ok_topk import OkTopkState as OkTopkState
from sparse_collectives.allreduce.ok_topk import ok_topk as ok_topk

__all__ = ["AutoChoice", "OkTopkState", "auto", "dense", "explain_auto", "ok_topk"]
