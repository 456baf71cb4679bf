"""Space repartition: P regions of the index space with equally many entries.

Ok-Topk, section 3.1.1. Each worker cuts the index space so that its own
selection falls into P equal parts; the average of the workers' cuts is used by
all of them. An average of ascending cuts is ascending.
"""

import jax
import jax.numpy as jnp

from sparse_collectives import _volumes, transport
from sparse_collectives._types import AxisName
from sparse_collectives.padded_coo import PaddedCOO


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


def consensus(coo: PaddedCOO, workers: int, axis: AxisName) -> jax.Array:
    """The boundaries averaged over the workers, ``i32[P + 1]``, equal on all.

    The sum is of integers, so it does not depend on the order of the workers, and
    each is divided first, so it cannot overflow; a boundary is at most P too low.
    """
    inner = local_boundaries(coo, workers)[1:-1]
    mean = transport.psum(inner // workers, axis)
    equal = equal_regions(coo.size, workers)
    return jnp.concatenate([equal[:1], mean, equal[-1:]])


def words_received(workers: int) -> float:
    """Words that :func:`consensus` makes each worker receive."""
    return _volumes.all_reduce(workers - 1, workers)
