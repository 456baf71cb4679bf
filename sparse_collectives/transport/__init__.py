"""How workers reach each other: the functions that algorithms are built on."""

from sparse_collectives.transport._dispatch import (
    all_gather as all_gather,
)
from sparse_collectives.transport._dispatch import (
    all_to_all as all_to_all,
)
from sparse_collectives.transport._dispatch import (
    axis_index as axis_index,
)
from sparse_collectives.transport._dispatch import (
    axis_size as axis_size,
)
from sparse_collectives.transport._dispatch import (
    holds_on_mesh as holds_on_mesh,
)
from sparse_collectives.transport._dispatch import (
    pmean as pmean,
)
from sparse_collectives.transport._dispatch import (
    ppermute as ppermute,
)
from sparse_collectives.transport._dispatch import (
    psum as psum,
)
from sparse_collectives.transport._dispatch import (
    psum_scatter as psum_scatter,
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
]
