"""The collectives on which the algorithms are built."""

from sparse_collectives.transport._direct import use_direct_messages
from sparse_collectives.transport._dispatch import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    holds_on_mesh,
    pmean,
    ppermute,
    psum,
    psum_scatter,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "holds_on_mesh",
    "pmean",
    "ppermute",
    "psum",
    "psum_scatter",
    "use_direct_messages",
]
