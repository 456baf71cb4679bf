"""Selectors: which entries of the accumulator a worker sends."""

from sparse_collectives.select._threshold_reuse import (
    ThresholdReuseState as ThresholdReuseState,
)
from sparse_collectives.select._threshold_reuse import (
    threshold_reuse as threshold_reuse,
)
from sparse_collectives.select._topk import topk as topk

__all__ = ["ThresholdReuseState", "threshold_reuse", "topk"]
