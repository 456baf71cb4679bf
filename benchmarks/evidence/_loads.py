"""Who owns how many entries: regions that are equal, balanced or hashed, for the figures.

The selections are those of the LSTM with one layer's gradients times 100, where equal regions are
worst. They are dealt out here without an allreduce, so that any number of workers is cheap.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sparse_collectives.allreduce._parts import _hashed

from ..training._replay import unevenness
from ._curves import Curve, Points
from ._recording import DENSITIES, recording

WORKERS = (2, 4, 8, 16, 32)
REGIONS = {
    "equal": "equal regions",
    "balanced": "balanced regions (the paper's)",
    "hashed": "hashed regions (ours)",
}


class Step(NamedTuple):
    """One recorded step.

    Attributes:
      indices: what each worker selects, ascending, without padding.
      delivered: the top k of the sum of all selections.
    """

    indices: list[np.ndarray]
    delivered: np.ndarray


@functools.lru_cache(maxsize=16)
def _steps(workers: int, seed: int, quick: bool) -> tuple[int, list[Step]]:
    """n, and the recorded steps of the first workers."""
    found = recording("text", seed, quick, True)
    size, steps = found.size, []
    k = max(1, round(DENSITIES["text"] * size))
    for coo in found.selections:
        chosen, values = np.asarray(coo.indices)[:workers], np.asarray(coo.values)[:workers]
        sums = np.zeros(size + 1, np.float32)
        np.add.at(sums, chosen.ravel(), values.ravel())
        top = np.argpartition(np.abs(sums[:-1]), size - k)[size - k :]
        steps.append(Step([row[row < size] for row in chosen], top[sums[top] != 0]))
    return size, steps


def cuts(size: int, indices: list[np.ndarray]) -> np.ndarray:
    """Boundaries of the paper, ``[P + 1]``: the mean of those that are even for each worker."""
    workers = len(indices)
    own = [row[np.arange(1, workers) * len(row) // workers] for row in indices if len(row)]
    inner = np.mean(own, axis=0) if own else np.arange(1, workers) * size / workers
    return np.concatenate([[0], np.floor(inner), [size]])


def owners(regions: str, size: int, first: Step, step: int) -> Callable[[np.ndarray], np.ndarray]:
    """The owner of each index at a step.

    Args:
      regions: one of REGIONS.
      size: n.
      first: the step at which balanced regions are cut.
      step: its number, from which a hash is made.
    """
    workers = len(first.indices)
    if regions == "hashed":

        def hashed(indices: np.ndarray) -> np.ndarray:
            given = jnp.asarray(indices, jnp.int32), size, workers, jnp.int32(step)
            return np.asarray(_hashed.row_and_owner(*given)[1])

        return hashed
    edges = np.arange(workers + 1) * size // workers
    if regions == "balanced":
        edges = cuts(size, first.indices)
    return lambda indices: np.searchsorted(edges, indices, side="right") - 1


def to_owner(step: Step, owner: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Entries that each owner gets from the others, ``[P]``."""
    workers = len(step.indices)
    counts = np.stack([np.bincount(owner(row), minlength=workers) for row in step.indices])
    np.fill_diagonal(counts, 0)
    return counts.sum(0)


def to_all(step: Step, owner: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Entries of the result that each owner sends to all, ``[P]``."""
    return np.bincount(owner(step.delivered), minlength=len(step.indices))


def _fullest(
    regions: str, counted: Callable[[Step, Callable[[np.ndarray], np.ndarray]], np.ndarray]
) -> Callable[[int, bool], Points]:
    """The fullest owner over the mean, in the mean of the recorded steps, by workers."""

    def measure(seed: int, quick: bool) -> Points:
        means = []
        for workers in WORKERS:
            size, steps = _steps(workers, seed, quick)
            means.append(
                np.mean(
                    [
                        unevenness(counted(one, owners(regions, size, steps[0], number)))
                        for number, one in enumerate(steps)
                    ]
                )
            )
        return np.array(WORKERS), np.array(means)

    return measure


CURVES = (
    *(Curve("reduce_load", line, _fullest(name, to_owner)) for name, line in REGIONS.items()),
    *(Curve("gather_load", line, _fullest(name, to_all)) for name, line in REGIONS.items()),
)
