"""Selectors of the papers, under the same contract, that others of this library outperform.

They are here to run the systems of the papers and to compare with them. docs/selectors.md lists
what each of them selects, and its limits.
"""

from sparse_collectives.select.published._adtopk import adtopk, adtopk_interleaved
from sparse_collectives.select.published._adtopk_threshold import adtopk_threshold
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
