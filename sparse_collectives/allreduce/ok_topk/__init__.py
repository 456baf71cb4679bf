"""Ok-Topk: an allreduce of O(k) words, by regions, for any number of workers."""

from sparse_collectives.allreduce.ok_topk._composition import ok_topk
from sparse_collectives.allreduce.ok_topk._state import OkTopkState

__all__ = ["OkTopkState", "ok_topk"]
