"""Ok-Topk: an allreduce of O(k) words, by regions, for any number of workers."""

from sparse_collectives.allreduce.ok_topk._composition import (
    OkTopkState,
    ok_topk,
)

__all__ = ["OkTopkState", "ok_topk"]
