"""What a training loop may want that has nothing to do with sparse exchanges."""

from optax_ext.contrib._checksums import check_checksums as check_checksums
from optax_ext.contrib._checksums import checksums as checksums
from optax_ext.contrib._distributed import distributed as distributed
from optax_ext.contrib._partitioned_norms import lamb as lamb
from optax_ext.contrib._partitioned_norms import lars as lars
from optax_ext.contrib._partitioned_norms import scale_by_trust_ratio as scale_by_trust_ratio
from optax_ext.contrib._tensorboard import tensorboard_writer as tensorboard_writer
from optax_ext.contrib._watchdog import Watchdog as Watchdog

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
