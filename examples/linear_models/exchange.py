"""The exchanges to choose from, with slots for everything, so that none of them loses anything."""

from collections.abc import Callable

import jax.numpy as jnp

from sparse_collectives import (
    PaddedCOO,
    ReduceInfo,
    SparseAllreduce,
    Undelivered,
    allreduce,
    transport,
)

from .batches import Fit

# So that a share that is a quotient of whole numbers is not rounded down to a slot less.
_ABOVE = 1 + 1e-9


def recursive_double(fit: Fit, workers: int) -> SparseAllreduce:
    """SSAR_Recursive_double, with no more slots than the largest union has members."""
    del workers
    return allreduce.ssar_recursive_double(capacity=fit.union)


def split_allgather(fit: Fit, workers: int) -> SparseAllreduce:
    """SSAR_Split_allgather, with the slots that the largest block and the largest region take."""
    slack = _slack(fit, workers)
    fill = max(1.0, _ABOVE * fit.region * workers / (slack * fit.selection))
    return allreduce.ssar_split_allgather(slack=slack, fill=fill)


def dsar_split_allgather(fit: Fit, workers: int) -> SparseAllreduce:
    """DSAR_Split_allgather, with the slots that the largest block takes."""
    return allreduce.dsar_split_allgather(slack=_slack(fit, workers))


def _slack(fit: Fit, workers: int) -> float:
    return max(1.0, _ABOVE * fit.block * workers / fit.selection)


# Of gradients, which have indices in common.
GRADIENTS: dict[str, Callable[[Fit, int], SparseAllreduce]] = {
    "dense": lambda fit, workers: allreduce.dense(),
    "ssar_recursive_double": recursive_double,
    "ssar_split_allgather": split_allgather,
    "dsar_split_allgather": dsar_split_allgather,
    "topk_a": lambda fit, workers: allreduce.topk_a(),
}

# Of changes of margins, of which nobody knows beforehand where they are.
MARGINS = {name: GRADIENTS[name] for name in ("dense", "ssar_recursive_double", "topk_a")}


def dense_allgather(shards: int) -> SparseAllreduce:
    """The dense counterpart of a sparse allgather, for updates of one's own range of indices.

    Every worker sends its range of ``ceil(n / P)`` entries whole, and the ranges side by side are
    the total. Cost: ``ceil(n / P) (P - 1)`` words received.

    Args:
      shards: P.

    Returns:
      A :class:`SparseAllreduce` without state; its total is ``f[n]``.
    """

    def reduce(coo: PaddedCOO, state: tuple[()], *, axis):
        width = -(-coo.size // shards)
        local = coo.indices - transport.axis_index(axis) * width
        local = jnp.where((coo.indices < coo.size) & (local >= 0), local, width)
        mine = jnp.zeros((width,), coo.values.dtype).at[local].set(coo.values, mode="drop")
        total = transport.all_gather(mine, axis).reshape(-1)[: coo.size]
        outside = (local >= width) & (coo.indices < coo.size)
        words = jnp.float32(width * (shards - 1))
        info = ReduceInfo(
            delivered=jnp.sum(total != 0, dtype=jnp.int32),
            overflow=jnp.sum(outside, dtype=jnp.int32),
            threshold=jnp.zeros((), jnp.float32),
            words=words,
            useful=words,
        )
        kept = Undelivered(
            jnp.where(outside, coo.values, jnp.zeros_like(coo.values)),
            PaddedCOO(coo.values[:0], coo.indices[:0], coo.size),
        )
        return total, kept, state, info

    return SparseAllreduce(lambda size, axis_size: (), reduce)


# Of updates of coordinates, each of which has one owner.
COORDINATES: dict[str, Callable[[int], SparseAllreduce]] = {
    "dense": lambda workers: allreduce.dense(),
    "dense_allgather": dense_allgather,
    "sparse_allgather": lambda workers: allreduce.sparse_allgather(),
}
