"""Who owns how many entries: regions that are equal, balanced or hashed, for the figures.

The selections are those of the LSTM with one layer's gradients times 100, where equal regions are
worst. They are dealt out here without an allreduce, so that any number of workers is cheap.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sparse_collectives.allreduce._shared import _hashed

from ..training._replay import unevenness
from ._code import Points
from ._recording import DENSITIES, recording, top_of_sum

WORKERS = (2, 4, 8, 16, 32)
REGIONS = ("equal", "balanced", "hashed")
Owner = Callable[[np.ndarray], np.ndarray]


class Step(NamedTuple):
    """What each worker selects, ascending, without padding, and the top k of the sum of it."""

    indices: list[np.ndarray]
    delivered: np.ndarray


@functools.lru_cache(maxsize=16)
def _steps(workers: int, seed: int, quick: bool) -> tuple[int, list[Step]]:
    """n, and the recorded steps of the first workers."""
    found, steps = recording("text", seed, quick, True), []
    for coo in found.selections:
        chosen = [row[row < found.size] for row in np.asarray(coo.indices)[:workers]]
        steps.append(Step(chosen, top_of_sum(coo, workers, DENSITIES["text"])))
    return found.size, steps


def cuts(size: int, indices: list[np.ndarray]) -> np.ndarray:
    """Boundaries of the paper, ``[P + 1]``: the mean of those that are even for each worker."""
    workers = len(indices)
    own = [row[np.arange(1, workers) * len(row) // workers] for row in indices if len(row)]
    inner = np.mean(own, axis=0) if own else np.arange(1, workers) * size / workers
    return np.concatenate([[0], np.floor(inner), [size]])


def owners(regions: str, size: int, first: Step, step: int) -> Owner:
    """The owner of each index at a step: hashes depend on its number, cuts on the first step."""
    workers = len(first.indices)
    if regions == "hashed":
        given = size, workers, jnp.int32(step)
        of = _hashed.row_and_owner
        return lambda indices: np.asarray(of(jnp.asarray(indices, jnp.int32), *given)[1])
    balanced = regions == "balanced"
    edges = cuts(size, first.indices) if balanced else np.arange(workers + 1) * size // workers
    return lambda indices: np.searchsorted(edges, indices, side="right") - 1


def to_owner(step: Step, owner: Owner) -> np.ndarray:
    """Entries that each owner gets from the others, ``[P]``."""
    workers = len(step.indices)
    counts = np.stack([np.bincount(owner(row), minlength=workers) for row in step.indices])
    np.fill_diagonal(counts, 0)
    return counts.sum(0)


def to_all(step: Step, owner: Owner) -> np.ndarray:
    """Entries of the result that each owner sends to all, ``[P]``."""
    return np.bincount(owner(step.delivered), minlength=len(step.indices))


def _fullest(regions: str, phase: str, seed: int, quick: bool) -> Points:
    """The fullest owner over the mean, in the mean of the recorded steps, by workers."""
    counted, means = {"reduce": to_owner, "gather": to_all}[phase], []
    for workers in WORKERS:
        size, steps = _steps(workers, seed, quick)
        by_step = [owners(regions, size, steps[0], number) for number in range(len(steps))]
        counts = [counted(step, owner) for step, owner in zip(steps, by_step, strict=True)]
        means.append(np.mean([unevenness(x) for x in counts]))
    return np.array(WORKERS), np.array(means)
