"""Many skipped steps in a row, noticed without waiting for a step.

The counters of a state are donated with it, so a loop keeps a copy of them now and then, and reads
the copy when the steps after it have been given to the devices as well.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._state import _wrappers

IN_A_ROW = 10


class Watch:
    """Warns once if :data:`IN_A_ROW` steps in a row were skipped; looks at every tenth call."""

    def __init__(self):
        self._calls = 0
        self._seen: np.ndarray | None = None
        self._copies: list[Any] = []
        self._warned = False

    def see(self, opt_state: Any, stacklevel: int) -> None:
        """Looks at the state that a step returned; the warning is for the caller above."""
        self._calls += 1
        if self._warned or self._calls % IN_A_ROW:
            return
        if self._copies and all(map(_is_ready, self._copies)):
            now = np.array([int(np.ravel(x)[0]) for x in self._copies])
            before = self._seen if self._seen is not None else np.zeros_like(now)
            if now.shape == before.shape and (self._seen is not None or not now[0]):
                self._warned = warn_if_all(now - before, stacklevel + 1)
            self._seen = now
        # Not by a program, which would be one for the mesh of jax.set_mesh.
        copy = functools.partial(jax.device_put, may_alias=False)
        self._copies = [copy(x, x.sharding) for x in _counters(opt_state)]


def warn_if_all(counts: Any, stacklevel: int) -> bool:
    """Warns if all steps were skipped: ``counts`` are steps, skipped and missed ones, by worker."""
    steps, skipped, *missed = counts
    together = skipped >= IN_A_ROW and not steps
    alone = any(IN_A_ROW <= x == steps for x in missed)
    if not together and not alone:
        return False
    who = "all workers skipped" if together else "a worker left out its"
    warnings.warn(
        f"{who} {int(skipped if together else steps)} steps in a row, because a gradient, or its "
        "sum with a residual, was not finite: nothing is learned. A mean over no examples, as of a "
        "worker with padding only, is 0/0 (make_train_step has weighted=True for it), and "
        "parameters that are not finite make every gradient so. The counters skipped and missed of "
        "optax_ext.get_state(opt_state) go on, and nonfinite='raise' ends the program instead.",
        stacklevel=stacklevel + 1,
    )
    return True


def _is_ready(x: Any) -> bool:
    return x.is_ready()


def _counters(opt_state: Any) -> list[jax.Array]:
    """``count``, ``skipped``, and ``missed`` of the workers of this process, of one reduction.

    Local steps around a reduction count for it.
    """
    for state in _wrappers.moving(opt_state):
        if hasattr(state.missed, "addressable_shards"):
            count = state.count.addressable_shards[0].data
            return [
                count,
                jnp.zeros_like(count),
                *(x.data for x in state.missed.addressable_shards),
            ]
    for state in _wrappers.reductions(opt_state):
        sparse = _wrappers.is_state(state)
        arrays = [state.count, state.skipped, *jax.tree.leaves(state.missed if sparse else ())]
        empty = sparse and not state.layout.size
        if empty or not all(hasattr(x, "addressable_shards") for x in arrays):
            continue
        count, skipped, *missed = ([y.data for y in x.addressable_shards] for x in arrays)
        return [count[0], skipped[0], *(y for each in missed for y in each)]
    return []
