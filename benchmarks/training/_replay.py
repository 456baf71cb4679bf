"""Sends recorded selections through Ok-Topk, and counts entries by worker."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import PaddedCOO, SparseAllreduce, simulate
from sparse_collectives.allreduce import ok_topk

AXIS = "workers"


class Step(NamedTuple):
    """The outcome of one step of :func:`replay`.

    The regions that it used, ``i32[P + 1]``; the indices of the result by the worker that sent them
    in the allgather, ``i32[P, slots]``, with n for padding; the entries of all workers that found
    no slot; the entries in the result; and the words that each worker received.
    """

    boundaries: np.ndarray
    indices: np.ndarray
    overflow: int
    delivered: int
    words: float


def received(selections: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """The entries, of ascending indices ``[P, c]``, that each owner gets from the others."""
    edges = np.array([np.searchsorted(row, boundaries) for row in selections])
    blocks = np.diff(edges, axis=1)
    np.fill_diagonal(blocks, 0)
    return blocks.sum(0)


def owned(indices: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """How many of ``indices`` are in each region, ``[P]``; padding is in none."""
    return np.diff(np.searchsorted(np.sort(indices, axis=None), boundaries))


def unevenness(counts: np.ndarray) -> float:
    """The largest over the mean; 1 if all are 0."""
    return float(np.max(counts) / np.mean(counts)) if np.any(counts) else 1.0


def replay(
    steps: Sequence[PaddedCOO], *, workers: int, density: float, period: int, **options: str
) -> list[Step]:
    """Sends the selections of the first ``workers`` of each step through the allreduce.

    The period counts the given steps, each with ``[P, c]`` slots; the other options are regions
    and balance of :func:`sparse_collectives.allreduce.ok_topk`.
    """
    init, step = _compiled(workers, density, period, **options)
    state, results = init(steps[0].size, workers), []
    for recorded in steps:
        coo = jax.tree.map(lambda x: jnp.asarray(x[:workers]), recorded)
        _, total, _, state, info = step(coo, state)
        boundaries, indices = np.asarray(state.boundaries), np.asarray(total.indices[0])
        overflow, delivered = int(np.sum(info.overflow)), int(info.delivered[0])
        words = float(info.words[0])
        found = Step(boundaries, indices.reshape(workers, -1), overflow, delivered, words)
        results.append(found)
    return results


@functools.cache
def _compiled(workers: int, density: float, period: int, **options: str):
    # The schedule has no influence on the result; this one compiles fastest.
    given = {"density": density, "repartition_period": period, "schedule": "all_to_all"}
    allreduce = ok_topk(**given, **options)
    return allreduce.init, on_workers(allreduce, workers, dense=False)


def on_workers(
    allreduce: SparseAllreduce, workers: int, selector: Any = None, *, dense: bool = True
) -> Callable[..., Any]:
    """A compiled step of all workers, ``step(given, state) -> (sent, total, kept, state, info)``.

    The input is the accumulators, from which the selector selects, or selections if there is no
    selector. The sent entries and the total are whole vectors, or pairs if ``dense`` is False.
    """

    def one(given, state):
        coo, kept = given, None
        if selector is not None:
            coo, _, _ = selector.select(given, selector.init(given.shape[0]))
        total, undelivered, state, info = allreduce.reduce(coo, state, axis=AXIS)
        if selector is not None:
            kept = undelivered.residual(given, coo)
        sent = coo.to_dense() if dense else coo
        whole = total.to_dense() if dense and isinstance(total, PaddedCOO) else total
        return sent, whole, kept, state, info

    compiled = simulate(one, axis=AXIS, axis_size=workers, in_axes=(0, None))

    def step(given, state):
        sent, total, kept, states, info = compiled(given, state)
        # The rest is the same on every worker, except for the overflow in `info`.
        return sent, total, kept, jax.tree.map(lambda x: x[0], states), info

    return step
