"""P regions of equal width: their owners add up the entries and send the sums to all workers.

SparCML, section 5.3.2: worker j owns region j of the index space. Indices are sent
relative to their region, so that a codec can make them narrower.

Deviation: the paper gives floor(n / P) indices to each worker and the rest to the
last (appendix A). All messages here have one size, which the widest region
determines: all regions have ceil(n / P) indices, and the last ones fewer or none.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparse_collectives import _hash, transport
from sparse_collectives._data import PaddedCOO, sum_dtype
from sparse_collectives._types import AxisName, Codec
from sparse_collectives.allreduce._parts import _merge, _messages, _stream
from sparse_collectives.allreduce._parts._slots import Regions
from sparse_collectives.transport import _dispatch


def split(coo: PaddedCOO, regions: Regions, capacity: int, turn: jax.Array) -> _merge.Blocks:
    """One block of ``capacity`` slots for each owner, with indices of its region."""
    boundaries = _boundaries(regions)
    blocks = _merge.split(coo, boundaries, capacity, turn)
    relative = blocks.coo.indices - boundaries[:-1, None]
    indices = jnp.where(blocks.coo.indices < coo.size, relative, regions.width)
    return blocks._replace(coo=PaddedCOO(blocks.coo.values, indices, regions.width))


def from_region(entries: PaddedCOO, regions: Regions, owner: jax.Array) -> PaddedCOO:
    """Entries of region ``owner i32[]`` (or of one region a row, ``i32[b]``) at their indices."""
    start = _boundaries(regions)[owner]
    start = start[:, None] if owner.ndim else start
    indices = jnp.where(entries.indices < entries.size, entries.indices + start, regions.size)
    return PaddedCOO(entries.values, indices, regions.size)


def gather(
    words: jax.Array, regions: Regions, dtype, *, axis: AxisName, codec: Codec, dense: bool
) -> _stream.Stream:
    """All workers' encoded regions, on every worker: ``f[n]``, or unique indices with padding."""
    gathered = transport.all_gather(words, axis)
    if dense:
        everyone = codec.decode_dense(gathered, regions.width, dtype)
        return everyone.reshape(-1)[: regions.size]
    everyone = codec.decode(gathered, regions.width, dtype)
    total = from_region(everyone, regions, jnp.arange(regions.workers, dtype=jnp.int32))
    return PaddedCOO(total.values.reshape(-1), total.indices.reshape(-1), regions.size)


def _boundaries(regions: Regions) -> jax.Array:
    ends = [min(worker * regions.width, regions.size) for worker in range(regions.workers + 1)]
    return jnp.asarray(ends, jnp.int32)


class Split(NamedTuple):
    """The result of the split.

    Attributes:
      sums: the sums of the region that this worker owns, ascending, with indices in it.
      sent: ``bool[c]`` over the slots of the selection: whether its owner has it.
      error: ``f[c]``, the part of a sent entry that the owner misses.
      words: the words that the exchange moved.
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
    count: jax.Array,
) -> Split:
    """One all_to_all of blocks of ``capacity`` slots each, or of dense regions if it is shorter."""
    seed = _hash.seed(count, 0, transport.axis_index(axis))
    if _stream.goes_dense(codec, capacity, regions.width, coo.values.dtype):
        return _dense(coo, regions, axis, codec, seed)
    workers, width, dtype = regions.workers, regions.width, coo.values.dtype
    blocks = split(coo, regions, capacity, _hash.turn(count, 0))
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
        _dispatch.words_of_all_to_all(encoded.message.size, workers),
        _messages.to_others(encoded.sent, transport.axis_index(axis)),
        (workers - 1) * capacity,
    )
    return Split(sums, sent, error, words)


def _dense(
    coo: PaddedCOO, regions: Regions, axis: AxisName, codec: Codec, seed: jax.Array
) -> Split:
    """Sends all values of every region, so that each entry has room."""
    workers, width, dtype = regions.workers, regions.width, coo.values.dtype
    rows = jnp.pad(coo.to_dense(), (0, workers * width - coo.size)).reshape(workers, width)
    message, lost = codec.encode_dense(rows, seed)
    received = codec.decode_dense(transport.all_to_all(message, axis), width, dtype)
    sums = _stream.entries_of(jnp.sum(received.astype(sum_dtype(dtype)), axis=0).astype(dtype))
    ascending = _merge.reduce_blocks([jax.tree.map(lambda x: x[None], sums)], width, dtype)
    # By row and column, because the number of all places may exceed an int32.
    place = coo.indices // width, coo.indices % width
    error = jnp.where(coo.indices < coo.size, lost.at[place].get(mode="fill", fill_value=0), 0)
    words = _messages.words_in_full(_dispatch.words_of_all_to_all(message.size, workers))
    return Split(ascending, coo.indices < coo.size, error, words)
