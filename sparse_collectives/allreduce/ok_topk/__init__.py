"""Ok-Topk: an allreduce of O(k) words, by regions, for any number of workers."""

from sparse_collectives.allreduce.ok_topk._composition import (
    OkTopkState as OkTopkState,
)
from sparse_collectives.allreduce.ok_topk._composition import (
    ok_topk as ok_topk,
)

__all__ = ["OkTopkState", "ok_topk"]
