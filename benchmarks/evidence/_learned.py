"""What is learned in how much time: trainings of the claims, with predicted times of a step."""

import jax
import numpy as np

from sparse_collectives import cost_model

from . import _runs
from ._code import Points
from ._runs import on_digits, on_text

# A step has only the exchange in it: what is computed depends on the machine, not on the link.
LINK = cost_model.network("0.1ms", "100Mbit")


def seconds(algorithm: str, density: float, size: int, workers: int) -> float:
    """The predicted time of the exchange of a step over LINK."""
    load = cost_model.Workload(size, max(1, round(density * size)), workers)
    return cost_model.predict(algorithm, load).expected.seconds(LINK)


def _accuracy(name: str, algorithm: str, density: float, seed: int, quick: bool) -> Points:
    found, size = on_digits(name, seed, quick), _size(_runs.digits().init(seed))
    step = seconds(algorithm, density, size, _runs.WORKERS)
    return np.array(found.steps[1:]) * step, 100 * np.array(found.values[1:])


def _loss(name: str, algorithm: str, density: float, seed: int, quick: bool) -> Points:
    found, size = on_text(name, seed, quick), _size(_runs.characters().init(seed))
    step = seconds(algorithm, density, size, _runs.TEXT_WORKERS)
    return np.array(found.steps[1:]) * step, np.array(found.losses)


def _size(params: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
