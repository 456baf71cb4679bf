"""The arrays of a loop: those that a step returned, that share a buffer, or that are pending.

XLA ends the process if a donated buffer has another use: with tied weights, with one array of zeros
for two leaves, or with parameters that are also in the batch. ``jax.device_put`` of an array can
return another one that shares its buffer on one device, so identity alone does not show it.

A call of a jitted step returns before it is computed, so a loop that never waits
queues steps without end. On CPU each device runs its queued work in a thread pool that all
of them share. With more devices than cores some reach a collective long after others, and
XLA ends the process when that takes 40 seconds. Nothing of this is special to sparse
allreduces. In your own loop, do what :class:`Queue` does, or wait for the loss of
each step with ``jax.block_until_ready``.
"""

import collections
import contextlib
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from optax_ext._state._host_checks import is_deleted
from sparse_collectives import _validation


class Returned:
    """The arrays that a step returned, by weak references, and their placement.

    They are in their places, and each has a buffer of its own.

    Args:
      params: the returned parameters.
      opt_state: the returned optimizer state.
      places: the placement of both.
    """

    def __init__(self, params: Any, opt_state: Any, places: Any):
        leaves, self._structure = jax.tree.flatten((params, opt_state))
        # A step is traced as a whole or not at all; traced arrays are used once.
        traced = bool(leaves) and isinstance(leaves[0], Tracer)
        self._leaves = [] if traced else list(map(weakref.ref, leaves))
        self._ids = frozenset(map(id, leaves))
        self._places = places

    def places_of(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """The placement, if these are the same arrays; None if it has to be determined.

        It is also None for arrays that another step has taken over, or that are also in the batch.
        """
        leaves, structure = jax.tree.flatten((params, opt_state))
        if len(leaves) != len(self._leaves) or structure != self._structure:
            return None
        if not all(known() is leaf for known, leaf in zip(self._leaves, leaves, strict=True)):
            return None
        examples = jax.tree.leaves(batch)
        if any(leaf.is_deleted() for leaf in leaves) or any(map(is_deleted, examples)):
            return None
        if any(id(leaf) in self._ids for leaf in examples):
            return None
        return self._places


def unshared(donated: Any, batch: Any) -> tuple[Any, Any]:
    """``(donated, batch)``, with copies of arrays whose buffer came up before."""
    leaves, treedef = jax.tree.flatten(donated)
    buffers: set[tuple[Any, int]] = set()
    leaves = [_unshared(leaf, buffers) for leaf in leaves]
    # Two leaves of a batch may share a buffer, since neither is donated.
    batch = jax.tree.map(lambda leaf: _unshared(leaf, {*buffers}), batch)
    return jax.tree.unflatten(treedef, leaves), batch


def _unshared(leaf: Any, buffers: set[tuple[Any, int]]) -> Any:
    """``leaf``, or a copy if one of its buffers is in ``buffers``, to which its own are added."""
    if _validation.is_key(leaf) and not isinstance(leaf, Tracer):
        found = jax.random.key_data(leaf)
        data = _unshared(found, buffers)
        if data is found:
            return leaf
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if not _is_array(leaf):
        return leaf
    found = _buffers(leaf)
    if buffers & found:
        # Each process copies its own shards, which needs no other process.
        shards = [jnp.copy(shard.data) for shard in leaf.addressable_shards]
        leaf = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
        found = _buffers(leaf)
    buffers |= found
    return leaf


def _buffers(leaf: jax.Array) -> set[tuple[Any, int]]:
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards}


def _is_array(leaf: Any) -> bool:
    """Whether it is an array on devices; keys are not."""
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


_ON_CPU = 2


def limit(steps_in_flight: int | None, mesh: Mesh) -> int | None:
    """The checked number of steps in flight; None for no limit."""
    if steps_in_flight is not None:
        return _validation.check_positive_int("steps_in_flight", steps_in_flight)
    return _ON_CPU if mesh.devices.flat[0].platform == "cpu" else None


class Queue:
    """Results of the last steps, of which so many may be pending."""

    def __init__(self, size: int | None):
        self._size = size
        self._results: collections.deque[Any] = collections.deque()

    def wait(self) -> None:
        """Waits until another step may be pending, before it takes over its arguments.

        An error of an earlier step is in the results of that step, and is not raised here.
        """
        while self._size is not None and len(self._results) >= self._size:
            with contextlib.suppress(Exception):
                jax.block_until_ready(self._results.popleft())

    def add(self, result: Any) -> None:
        """Adds the result of a step."""
        if self._size is not None and not isinstance(result, Tracer):
            self._results.append(result)
