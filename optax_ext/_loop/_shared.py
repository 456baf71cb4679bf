"""Buffers that a step would be given twice, and donate.

Tied weights, one array of zeros for two leaves, or parameters that are in the batch, too: XLA ends
the process where a buffer that is donated has another use. ``jax.device_put`` of one array makes
others that share its buffer on one device, so that identity alone does not tell.
"""

import weakref
from typing import Any

import jax
import jax.numpy as jnp


class Unshared:
    """Copies what occurs twice in what a step is given.

    What a step has returned shares nothing, so that only other arrays are looked at.
    """

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[Any]] = {}

    def returned(self, *donated: Any) -> None:
        """Remembers arrays of which each has a buffer of its own."""
        leaves = filter(_is_array, jax.tree.leaves(donated))
        self._made = {id(leaf): weakref.ref(leaf) for leaf in leaves}

    def __call__(self, donated: Any, batch: Any) -> tuple[Any, Any]:
        """``(donated, batch)``, with copies of arrays whose buffer was there before."""
        leaves, treedef = jax.tree.flatten(donated)
        seen = {id(leaf) for leaf in leaves}
        of_batch = jax.tree.leaves(batch)
        alone = len(seen) == len(leaves) and all(id(leaf) not in seen for leaf in of_batch)
        if alone and all(map(self._is_known, leaves)):
            return donated, batch
        buffers: set[tuple[Any, int]] = set()
        leaves = [_unshared(leaf, buffers) for leaf in leaves]
        # Two leaves of a batch may share what is not donated.
        batch = jax.tree.map(lambda leaf: _unshared(leaf, {*buffers}), batch)
        return jax.tree.unflatten(treedef, leaves), batch

    def _is_known(self, leaf: Any) -> bool:
        known = self._made.get(id(leaf))
        return known is not None and known() is leaf


def _unshared(leaf: Any, buffers: set[tuple[Any, int]]) -> Any:
    """``leaf``, or a copy where ``buffers`` has one of its buffers; they are added."""
    if not _is_array(leaf):
        return leaf
    found = _buffers(leaf)
    if buffers & found:
        # Each process copies what it has: that needs no other process.
        shards = [jnp.copy(shard.data) for shard in leaf.addressable_shards]
        leaf = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
        found = _buffers(leaf)
    buffers |= found
    return leaf


def _buffers(leaf: jax.Array) -> set[tuple[Any, int]]:
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards}


def _is_array(leaf: Any) -> bool:
    """Whether it is on devices; keys are not looked into."""
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
