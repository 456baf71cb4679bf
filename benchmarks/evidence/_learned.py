"""What is learned in how much time: trainings of the claims, with predicted times of a step."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from sparse_collectives import cost_model

from . import _runs
from ._curves import Points, curves
from ._runs import DENSITY, on_digits, on_text

# A step has only the exchange in it: what is computed depends on the machine, not on the link.
LINK = cost_model.network("0.1ms", "100Mbit")


class Way(NamedTuple):
    """A way to train: its line in the legend, its names in `_runs` and `cost_model`, and k / n."""

    line: str
    name: str
    algorithm: str
    density: float = DENSITY


DIGITS = (
    Way("dense, SGD", "dense", "dense"),
    Way("dense, AdamW", "adamw", "dense"),
    Way("ok_topk_sgd, 1 %", "ok_topk_sgd", "ok_topk"),
    Way("topk_a in front of SGD, 1 %", "top-k", "topk_a"),
    Way("sparse_adamw", "sparse_adamw", "agreed(few)", 0.05),
)
TEXT = (
    Way("dense, AdamW", "dense", "dense"),
    Way("ok_topk in front of AdamW, 1 %", "ok_topk", "ok_topk"),
    Way("sparse_adamw", "sparse_adamw", "agreed(few)", 0.05),
)


def seconds(way: Way, size: int, workers: int) -> float:
    """The predicted time of the exchange of a step over LINK."""
    load = cost_model.Workload(size, max(1, round(way.density * size)), workers)
    return cost_model.predict(way.algorithm, load).expected.seconds(LINK)


def _accuracy(way: Way, seed: int, quick: bool) -> Points:
    found, size = on_digits(way.name, seed, quick), _size(_runs.digits().init(seed))
    x = np.array(found.steps[1:]) * seconds(way, size, _runs.WORKERS)
    return x, 100 * np.array(found.values[1:])


def _loss(way: Way, seed: int, quick: bool) -> Points:
    found, size = on_text(way.name, seed, quick), _size(_runs.characters().init(seed))
    x = np.array(found.steps[1:]) * seconds(way, size, _runs.TEXT_WORKERS)
    return x, np.array(found.losses)


def _size(params: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


CURVES = (
    *curves("accuracy_time", {way.line: partial(_accuracy, way) for way in DIGITS}),
    *curves("loss_time", {way.line: partial(_loss, way) for way in TEXT}),
)
