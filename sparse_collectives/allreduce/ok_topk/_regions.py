"""Space repartition: P regions of the index space with equally many entries.

Ok-Topk, section 3.1.1. Each worker cuts the index space so that its own
selection falls into P equal parts; the average of the workers' cuts is used by
all of them. An average of ascending cuts is ascending.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import transport
from sparse_collectives._data import PaddedCOO
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce._shared import _messages
from sparse_collectives.allreduce.ok_topk._plan import Collective


def equal_regions(size: int, workers: int) -> jax.Array:
    """The boundaries of P regions of equal width, ``i32[P + 1]``."""
    return jnp.asarray([worker * size // workers for worker in range(workers + 1)], jnp.int32)


def local_boundaries(coo: PaddedCOO, workers: int) -> jax.Array:
    """Boundaries that put equally many entries of ``coo`` into each region.

    ``coo`` is ascending. With an empty selection the regions have equal width.
    """
    count = coo.count()
    part = jnp.arange(1, workers, dtype=jnp.int32)
    # part * count / workers, without the overflow of the product.
    rank = (count // workers) * part + (count % workers) * part // workers
    inner = coo.indices.at[rank].get(mode="clip")
    equal = equal_regions(coo.size, workers)
    inner = jnp.where(count > 0, inner, equal[1:-1])
    return jnp.concatenate([equal[:1], inner, equal[-1:]])


def agree(
    coo: PaddedCOO,
    boundaries: jax.Array,
    repartition: jax.Array,
    exchange: Collective,
    axis: AxisName,
) -> tuple[jax.Array, _messages.Words]:
    """Algorithm 1, lines 5 to 7: the consensus where ``repartition bool[]``, else as they were.

    Returns:
      ``i32[P + 1]``, equal on all workers; and the words moved.
    """
    workers = transport.axis_size(axis)
    boundaries = lax.cond(repartition, lambda: consensus(coo, workers, axis), lambda: boundaries)
    received = jnp.where(repartition, exchange.received(workers), 0.0)
    return boundaries, _messages.words_in_full(received)


def consensus(coo: PaddedCOO, workers: int, axis: AxisName) -> jax.Array:
    """The boundaries averaged over the workers, ``i32[P + 1]``, equal on all.

    The mean is rounded down. Its sum is one of integers, so it does not depend on
    the order of the workers; quotients and remainders by P are summed separately,
    so that nothing overflows for P up to 46,340.
    """
    inner = local_boundaries(coo, workers)[1:-1]
    parts = jnp.stack([inner // workers, inner % workers])
    quotients, remainders = transport.psum(parts, axis)
    mean = quotients + remainders // workers
    equal = equal_regions(coo.size, workers)
    return jnp.concatenate([equal[:1], mean, equal[-1:]])
