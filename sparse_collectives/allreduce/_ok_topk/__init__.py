"""Ok-Topk: an allreduce of O(k) words, by regions, for any number of workers."""

from sparse_collectives.allreduce._ok_topk._ok_topk import ok_topk
from sparse_collectives.allreduce._ok_topk._state import OkTopkState

__all__ = ["OkTopkState", "ok_topk"]
