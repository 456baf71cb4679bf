"""Selectors of the papers that another one of this library outdoes, under the same contract.

They are here so that the papers' systems can be run and compared with; docs/selectors.md says
where each of them still is the right one.
"""

from sparse_collectives.select.published._adtopk import adtopk
from sparse_collectives.select.published._adtopk_interleaved import (
    adtopk_interleaved,
)
from sparse_collectives.select.published._adtopk_threshold import (
    adtopk_threshold,
)
from sparse_collectives.select.published._dgc import dgc
from sparse_collectives.select.published._gaussian_k import gaussian_k
from sparse_collectives.select.published._mstopk import mstopk
from sparse_collectives.select.published._redsync import redsync
from sparse_collectives.select.published._sidco import sidco

__all__ = [
    "adtopk",
    "adtopk_interleaved",
    "adtopk_threshold",
    "dgc",
    "gaussian_k",
    "mstopk",
    "redsync",
    "sidco",
]
