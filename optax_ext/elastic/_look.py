"""What the workers of a group learn of each other from time to time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from optax_ext.elastic import _checks, _seats
from optax_ext.elastic._programs import Group


class Seen(NamedTuple):
    """The same on all workers of a group.

    Attributes:
      meets: whether a process would like to take part or to leave, so that all meet again.
      leaves: ``bool[P]`` in the order of the group, the workers that leave.
      residuals: the sum of the magnitudes of each worker's residual, by process.
    """

    meets: bool
    leaves: np.ndarray
    residuals: dict[int, float]


def look(
    group: Group, own: PartitionSpec, params: Any, opt_state: Any, waits: bool, leaves: bool
) -> Seen:
    """Exchanges four words with the other workers, and compares their parameters.

    Args:
      group: the workers and their programs.
      own: the spec of arrays with a row for each worker.
      params: global arrays, which all workers should have the same.
      opt_state: global arrays.
      waits: whether this worker has heard of one that would like to take part.
      leaves: whether this worker leaves.

    Raises:
      RuntimeError: parameters differ.
    """
    digest, residual = _checks.digest(_seats.own(params), _checks.residuals(_seats.own(opt_state)))
    row = np.array([waits, leaves, int(digest), 0], np.uint32)[None]
    row[0, 3] = np.float32(residual).view(np.uint32)
    rows = np.asarray(jax.block_until_ready(group.poll(_seats.placed(row, own, group.mesh))))
    if len({*rows[:, 2].tolist()}) > 1:
        each = dict(zip(group.order, map(hex, rows[:, 2].tolist()), strict=True))
        raise RuntimeError(
            f"the parameters of the workers differ, digests by process: {each}. Start all of them "
            "again, from a checkpoint."
        )
    magnitudes = rows[:, 3].view(np.float32).tolist()
    return Seen(
        bool(rows[:, :2].any()),
        rows[:, 1].astype(bool),
        dict(zip(group.order, magnitudes, strict=True)),
    )
