"""What a library built on this one may use, as optax_ext does.

The packages beside this one are for those who train; this one is for those who
write transformations, allreduces and selectors of their own, and need the same
checks, axes and bits. It is documented where it is defined, and what is not
listed here or there is private.
"""

from sparse_collectives._compat import (
    axis_is_bound,
    axis_names,
    checks_varying,
    ranks,
    static_axis,
    to_varying,
    varying_like,
)
from sparse_collectives._coo._bits import magnitude_bits
from sparse_collectives._coo.finite import all_finite
from sparse_collectives._coo.kth_magnitude import largest_mask
from sparse_collectives._hash import combine, mix
from sparse_collectives._platform import traced_for
from sparse_collectives._types import AxisName, State
from sparse_collectives._validation import (
    check_choice,
    check_density,
    check_float,
    check_number,
    check_positive_int,
    check_size,
)
from sparse_collectives._volumes import all_gather as words_of_all_gather
from sparse_collectives._volumes import all_reduce as words_of_all_reduce
from sparse_collectives._volumes import reduce_scatter as words_of_reduce_scatter
from sparse_collectives.allreduce._hierarchical import outer_axis, shard_size
from sparse_collectives.padded_coo import empty

__all__ = [
    "AxisName",
    "State",
    "all_finite",
    "axis_is_bound",
    "axis_names",
    "check_choice",
    "check_density",
    "check_float",
    "check_number",
    "check_positive_int",
    "check_size",
    "checks_varying",
    "combine",
    "empty",
    "largest_mask",
    "magnitude_bits",
    "mix",
    "outer_axis",
    "ranks",
    "shard_size",
    "static_axis",
    "to_varying",
    "traced_for",
    "varying_like",
    "words_of_all_gather",
    "words_of_all_reduce",
    "words_of_reduce_scatter",
]
