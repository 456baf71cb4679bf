"""Theorem 3.1 of Ok-Topk: the case in which its lower bound is reached.

All that worker i selects is in region i, and each region has k/P of the k largest sums. Then
nothing has to be reduced, and an allgather of k pairs is all: 2k (P-1)/P words. What is counted is
what the workers put into their messages, ``ReduceInfo.useful``: slots are static and made for other
cases, too. With the default ones a region has no room for all k of a worker, so here it has.
"""

import math

import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc

from ..training._replay import on_workers
from ._words import DENSITY, SELECTED, SIZE

WORKERS = (4, 16)


def selections(workers: int) -> sc.PaddedCOO:
    """Of worker i the k entries of region i, and of the k largest sums k/P in each region."""
    k, width = SELECTED, SIZE // workers
    indices = np.arange(k) * width // k + np.arange(workers)[:, None] * width
    # By rank, and a little apart from those of the same rank elsewhere. The ranks are mixed, so
    # that magnitudes do not fall along a region.
    rank = np.random.default_rng(0).permutation(k)
    values = 1 + (k - rank + np.arange(workers)[:, None] / workers) / k
    return sc.PaddedCOO(jnp.asarray(values, jnp.float32), jnp.asarray(indices, jnp.int32), SIZE)


def _second_step(coo: sc.PaddedCOO, workers: int) -> tuple[np.ndarray, sc.ReduceInfo]:
    """The indices that a step delivers, and what it says; the first has no threshold yet."""
    allreduce = sc.allreduce.ok_topk(density=DENSITY, regions="equal", slack=math.inf)
    step, state = on_workers(allreduce, workers, dense=False), allreduce.init(SIZE, workers)
    for _ in range(2):
        _, total, _, state, info = step(coo, state)
    return np.asarray(total.indices[0])[np.asarray(total.values[0]) != 0], info


def _tight() -> dict[str, float]:
    useful, received, shares = [], [], []
    for workers in WORKERS:
        bound, coo = 2 * SELECTED * (workers - 1) / workers, selections(workers)
        flat = np.asarray(coo.values).ravel()
        largest = np.asarray(coo.indices).ravel()[np.argsort(-flat)[:SELECTED]]
        delivered, info = _second_step(coo, workers)
        useful.append(float(info.useful.mean()) / bound)
        received.append(float(info.words[0]) / bound)
        shares.append(np.intersect1d(delivered, largest).size / SELECTED)
    return {
        "least of filled words / bound": min(useful),
        "most of filled words / bound": max(useful),
        "words with padding / bound": max(received),
        "of the k largest sums delivered": min(shares),
    }
