"""Theorem 3.1 of Ok-Topk: the case in which its lower bound is reached.

All that worker i selects is in region i, and each region has k/P of the k largest sums. Then
nothing has to be reduced, and an allgather of k pairs is all: 2k (P-1)/P words. What is counted is
what the workers put into their messages, ``ReduceInfo.useful``: slots are static and made for other
cases, too. With the default ones a region has no room for all k of a worker, so here it has.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc

from ._claims import Bound, Claim, Elsewhere

SIZE, DENSITY = 1_000_000, 0.01
WORKERS = (4, 16)
# The first has no threshold to begin from.
STEPS = 2


def selections(workers: int) -> sc.PaddedCOO:
    """Of worker i the k entries of region i, and of the k largest sums k/P in each region."""
    k, width = round(DENSITY * SIZE), SIZE // workers
    places = np.arange(k) * width // k
    indices = places + np.arange(workers)[:, None] * width
    # By rank, and a little apart from those of the same rank elsewhere. The ranks are mixed, so
    # that magnitudes do not fall along a region.
    rank = np.random.default_rng(0).permutation(k)
    values = 1 + (k - rank + np.arange(workers)[:, None] / workers) / k
    return sc.PaddedCOO(jnp.asarray(values, jnp.float32), jnp.asarray(indices, jnp.int32), SIZE)


@functools.cache
def _steps(workers: int) -> list[dict[str, Any]]:
    """The total, what is useful and what is received, of each step; not to be changed."""
    allreduce = sc.allreduce.ok_topk(density=DENSITY, regions="equal", slack=math.inf)
    coo = selections(workers)

    def one(values: jax.Array, indices: jax.Array, state: Any):
        given = sc.PaddedCOO(values, indices, SIZE)
        total, _, state, info = allreduce.reduce(given, state, axis="w")
        return total.indices, total.values, state, info

    step = sc.simulate(one, axis="w", axis_size=workers, in_axes=(0, 0, None))
    state, found = allreduce.init(SIZE, workers), []
    for _ in range(STEPS):
        indices, values, states, info = step(coo.values, coo.indices, state)
        state = jax.tree.map(lambda x: x[0], states)
        filled = np.asarray(indices[0])[np.asarray(values[0]) != 0]
        found.append(
            {
                "delivered": filled,
                "useful": float(info.useful.mean()),
                "received": float(info.words[0]),
            }
        )
    return found


def _tight(_seed: int, _quick: bool) -> dict[str, float]:
    k = round(DENSITY * SIZE)
    useful, received, shares = [], [], []
    for workers in WORKERS:
        bound = 2 * k * (workers - 1) / workers
        coo = selections(workers)
        flat = np.asarray(coo.values).ravel()
        largest = np.asarray(coo.indices).ravel()[np.argsort(-flat)[:k]]
        for step in _steps(workers)[1:]:
            useful.append(step["useful"] / bound)
            received.append(step["received"] / bound)
            shares.append(np.intersect1d(step["delivered"], largest).size / k)
    return {
        "least of filled words / bound": min(useful),
        "most of filled words / bound": max(useful),
        "words with padding / bound": max(received),
        "of the k largest sums delivered": min(shares),
    }


CLAIMS = (
    Claim(
        "ok-topk/lower-bound",
        "The lower bound of 2k (P-1)/P words is reached where worker i selects in region i alone.",
        "Ok-Topk, Theorem 3.1",
        "equal to it",
        f"n = {SIZE:,}, density 1 %, P = {' and '.join(map(str, WORKERS))}, equal regions with "
        "room for all (`slack=inf`), the second step; the words that are filled, not padding",
        (
            Bound("least of filled words / bound", 1, 1),
            Bound("most of filled words / bound", 1, 1),
            Bound("of the k largest sums delivered", 1, 1),
        ),
        _tight,
        exact=True,
        elsewhere=Elsewhere(
            "to 10 %: the words that agree on the threshold",
            (
                Bound("least of filled words / bound", least=1),
                Bound("most of filled words / bound", most=1.1),
                Bound("of the k largest sums delivered", 1, 1),
            ),
        ),
    ),
)
