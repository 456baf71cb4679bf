"""Selectors: which entries of the accumulator a worker sends."""

from sparse_collectives.select._adtopk import adtopk as adtopk
from sparse_collectives.select._adtopk_interleaved import (
    ADTopkInterleavedState as ADTopkInterleavedState,
)
from sparse_collectives.select._adtopk_interleaved import (
    adtopk_interleaved as adtopk_interleaved,
)
from sparse_collectives.select._adtopk_threshold import (
    ADTopkThresholdState as ADTopkThresholdState,
)
from sparse_collectives.select._adtopk_threshold import adtopk_threshold as adtopk_threshold
from sparse_collectives.select._bucketed import bucketed as bucketed
from sparse_collectives.select._density import DensitySchedule as DensitySchedule
from sparse_collectives.select._density import exponential_density as exponential_density
from sparse_collectives.select._density import staged_density as staged_density
from sparse_collectives.select._density import strict_density as strict_density
from sparse_collectives.select._dgc import dgc as dgc
from sparse_collectives.select._gaussian_k import gaussian_k as gaussian_k
from sparse_collectives.select._layerwise import layerwise as layerwise
from sparse_collectives.select._mstopk import mstopk as mstopk
from sparse_collectives.select._parts._layers import LayersState as LayersState
from sparse_collectives.select._random_k import random_k as random_k
from sparse_collectives.select._redsync import redsync as redsync
from sparse_collectives.select._scheduled import ScheduledState as ScheduledState
from sparse_collectives.select._scheduled import scheduled as scheduled
from sparse_collectives.select._sidco import SIDCoState as SIDCoState
from sparse_collectives.select._sidco import sidco as sidco
from sparse_collectives.select._threshold import threshold as threshold
from sparse_collectives.select._threshold_reuse import (
    ThresholdReuseState as ThresholdReuseState,
)
from sparse_collectives.select._threshold_reuse import (
    threshold_reuse as threshold_reuse,
)
from sparse_collectives.select._topk import topk as topk

__all__ = [
    "ADTopkInterleavedState",
    "ADTopkThresholdState",
    "DensitySchedule",
    "LayersState",
    "SIDCoState",
    "ScheduledState",
    "ThresholdReuseState",
    "adtopk",
    "adtopk_interleaved",
    "adtopk_threshold",
    "bucketed",
    "dgc",
    "exponential_density",
    "gaussian_k",
    "layerwise",
    "mstopk",
    "random_k",
    "redsync",
    "scheduled",
    "sidco",
    "staged_density",
    "strict_density",
    "threshold",
    "threshold_reuse",
    "topk",
]
