"""Helpers for allreduces, selectors and transformations of your own.

They complement the contracts. To train a model, use the other packages. The docstring of each
helper documents it.
"""

from sparse_collectives._data import empty, only_where
from sparse_collectives._sparse_ops._bits import magnitude_bits
from sparse_collectives._sparse_ops._kth_magnitude import largest_mask
from sparse_collectives._validation import check_density
from sparse_collectives._varying import to_varying
from sparse_collectives.allreduce._parts._few_bits import (
    check_bits,
    sum_of_all,
    words_of_sum_of_all,
)
from sparse_collectives.transport._dispatch import (
    words_of_all_gather,
    words_of_all_reduce,
    words_of_reduce_scatter,
)

__all__ = [
    "check_bits",
    "check_density",
    "empty",
    "largest_mask",
    "magnitude_bits",
    "only_where",
    "sum_of_all",
    "to_varying",
    "words_of_all_gather",
    "words_of_all_reduce",
    "words_of_reduce_scatter",
    "words_of_sum_of_all",
]
