"""The split of SparCML (section 5.3.2): each region's entries go to its owner, who adds them up."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _volumes, transport
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._shared import _equal_regions, _merge, _messages, _step, _stream
from sparse_collectives.allreduce._shared._slots import Regions
from sparse_collectives.padded_coo import PaddedCOO, sum_dtype


class Split(NamedTuple):
    """What the split did.

    Attributes:
      sums: of the region that this worker owns, ascending, with indices in it.
      sent: ``bool[c]`` over the slots of the selection: whether its owner has it.
      error: ``f[c]``, what the owner misses of an entry that was sent.
      words: what the exchange moved.
    """

    sums: PaddedCOO
    sent: jax.Array
    error: jax.Array
    words: _messages.Words


def to_owners(
    coo: PaddedCOO,
    regions: Regions,
    capacity: int,
    *,
    axis: AxisName,
    codec: Codec,
    state: _step.StepState,
) -> Split:
    """One all_to_all of blocks, of ``capacity`` slots each, or dense where that is shorter."""
    seed = _step.seed(state, 0, transport.axis_index(axis))
    if _stream.goes_dense(codec, capacity, regions.width, coo.values.dtype):
        return _dense(coo, regions, axis, codec, seed)
    workers, width, dtype = regions.workers, regions.width, coo.values.dtype
    blocks = _equal_regions.split(coo, regions, capacity, _step.turn(state.count, 0))
    encoded = codec.encode(blocks.coo, seed)
    received = transport.all_to_all(encoded.message, axis)
    sums = _merge.reduce_blocks(
        [codec.decode(received, width, dtype)], width, dtype, capacity=workers * capacity
    )
    sent, error = blocks.sent, jnp.zeros_like(coo.values)
    if not codec.exact:
        sent = sent.at[blocks.source].set(encoded.sent, mode="drop")
        error = error.at[blocks.source].set(encoded.error, mode="drop")
    words = _messages.words_of_pairs(
        _volumes.all_to_all(encoded.message.size, workers),
        _messages.to_others(encoded.sent, transport.axis_index(axis)),
        (workers - 1) * capacity,
    )
    return Split(sums, sent, error, words)


def _dense(
    coo: PaddedCOO, regions: Regions, axis: AxisName, codec: Codec, seed: jax.Array
) -> Split:
    """All values of every region, so that each entry finds room."""
    workers, width, dtype = regions.workers, regions.width, coo.values.dtype
    rows = jnp.pad(coo.to_dense(), (0, workers * width - coo.size)).reshape(workers, width)
    message, lost = codec.encode_dense(rows, seed)
    received = codec.decode_dense(transport.all_to_all(message, axis), width, dtype)
    sums = _stream.entries_of(jnp.sum(received.astype(sum_dtype(dtype)), axis=0).astype(dtype))
    ascending = _merge.reduce_blocks([jax.tree.map(lambda x: x[None], sums)], width, dtype)
    # By row and column: all places together may be more than an int32 counts.
    place = coo.indices // width, coo.indices % width
    error = jnp.where(coo.indices < coo.size, lost.at[place].get(mode="fill", fill_value=0), 0)
    words = _messages.words_in_full(_volumes.all_to_all(message.size, workers))
    return Split(ascending, coo.indices < coo.size, error, words)
