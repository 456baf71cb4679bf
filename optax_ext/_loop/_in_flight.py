"""How many steps may wait to be computed.

A call of a jitted step returns before it is computed, so a loop that never waits
queues steps without end. On CPU each device runs what is queued in a thread pool that all
of them share. With more devices than cores some reach a collective long after others, and
XLA ends the process when that takes 40 seconds. Nothing of this is special to sparse
allreduces; a loop of one's own does what :class:`Queue` does, or waits for the loss of
each step with ``jax.block_until_ready``.
"""

import collections
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from sparse_collectives import _validation

_ON_CPU = 2


def limit(steps_in_flight: int | None, mesh: Mesh) -> int | None:
    """A checked number of steps; None for no limit."""
    if steps_in_flight is not None:
        return _validation.check_positive_int("steps_in_flight", steps_in_flight)
    return _ON_CPU if mesh.devices.flat[0].platform == "cpu" else None


class Queue:
    """Results of the last steps; adding one waits for those that are too old."""

    def __init__(self, size: int | None):
        self._size = size
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> None:
        """Takes the result of a step, and waits until fewer than ``size`` others are left."""
        if self._size is None or isinstance(result, Tracer):
            return
        self._results.append(result)
        while len(self._results) > self._size:
            jax.block_until_ready(self._results.popleft())
