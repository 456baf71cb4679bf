"""Buffers that a step would be given twice, and donate.

Tied weights, one array of zeros for two leaves, or parameters that are in the batch, too: XLA ends
the process where a buffer that is donated has another use. ``jax.device_put`` of one array makes
others that share its buffer on one device, so that identity alone does not tell.
"""

from typing import Any

import jax
import jax.numpy as jnp


def unshared(donated: Any, batch: Any) -> tuple[Any, Any]:
    """``(donated, batch)``, with copies of arrays whose buffer was there before."""
    leaves, treedef = jax.tree.flatten(donated)
    buffers: set[tuple[Any, int]] = set()
    leaves = [_unshared(leaf, buffers) for leaf in leaves]
    # Two leaves of a batch may share what is not donated.
    batch = jax.tree.map(lambda leaf: _unshared(leaf, {*buffers}), batch)
    return jax.tree.unflatten(treedef, leaves), batch


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
