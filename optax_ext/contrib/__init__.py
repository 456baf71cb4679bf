"""Tools for a training loop that are independent of sparse exchanges."""

from optax_ext.contrib._checksums import check_checksums, checksums
from optax_ext.contrib._distributed import distributed
from optax_ext.contrib._partitioned_norms import lamb, lars, scale_by_trust_ratio
from optax_ext.contrib._tensorboard import tensorboard_writer
from optax_ext.contrib._watchdog import Watchdog

__all__ = [
    "Watchdog",
    "check_checksums",
    "checksums",
    "distributed",
    "lamb",
    "lars",
    "scale_by_trust_ratio",
    "tensorboard_writer",
]
