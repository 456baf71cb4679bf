"""Unions, selections and accumulators of one training with top-k error feedback.

Several claims use the same training, so it runs once for a seed and is kept.
"""

import argparse
import functools
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_collectives import Layout, PaddedCOO

from .._common.contestants import selector_factory
from ..training import _measures
from ..training._measures import Leaf, MissingRows, largest
from ..training._recorded_tasks import recorded_runs
from ..training._recorded_training import Recorder
from ..training._unions import growth
from ._runs import quiet

# The two runs that Ok-Topk reports, VGG-16 on 16 workers and an LSTM on 32, and the LSTM with the
# gradient of one layer multiplied by 100 before the selection.
WORKERS = {"images": 16, "text": 32, "scaled": 32}
DENSITIES = {"images": 0.01, "text": 0.02, "scaled": 0.02}
# Quick and full.
STEPS = {"images": (20, 100), "text": (8, 30), "scaled": (8, 8)}
RECORDS, FACTOR = 8, 100.0
# The matrix whose rows are examined one by one, and the ways to select from it.
ROWS_OF = "lstm_1/recurrent"
ROW_CHOICES = ("no compression", "top-k of the layer", "ADTopk")


class Recording(NamedTuple):
    """A training of a small VGG on digits, or of an LSTM on characters."""

    # n.
    size: int
    # Distinct indices in the selections of the first worker, the first two, and so on, at each
    # step, / n: ``[steps, P]``.
    unions: np.ndarray
    # ``[P, c]`` at some steps.
    selections: list[PaddedCOO]
    # The rows in which top-k selects nothing, in some accumulators of the text run.
    missing: MissingRows
    # The share of the exact top-k that MSTopK selects, at some steps.
    same: list[float]
    # The sum of magnitudes that ADTopk selects / the sum for top-k, at some steps of the text run.
    by_row: list[float]
    # The k-th magnitude of the first worker's accumulator, and Gaussiank's estimate of it.
    thresholds: list[tuple[float, float]]
    # Some steps of the text run, and the sums of the magnitudes that ROW_CHOICES select in each
    # row of ROWS_OF, ``[3, rows]``.
    rows: list[tuple[int, np.ndarray]]


def recorder(name: str, seed: int) -> Recorder:
    """The program that trains on images or text."""
    of, batch = ("images", 4) if name == "images" else ("text", 2)
    given = {f"density_{x}": DENSITIES[x] for x in ("images", "text")}
    given |= {"text": None, "images": None, "batch": batch, "seed": seed}
    (run,) = [x for x in recorded_runs(argparse.Namespace(**given)) if x.name == of]
    return Recorder(run, WORKERS[name], factor=FACTOR if name == "scaled" else None)


@functools.lru_cache(maxsize=3)
def recording(name: str, seed: int, quick: bool) -> Recording:
    """Trains once."""
    training, density = recorder(name, seed), DENSITIES[name]
    steps = STEPS[name][not quick]
    layout = Layout.of(training.task.params)
    # Each shape is compiled for all densities, and a bias is one row, which is never missed.
    rows = [leaf for leaf in training.layout if not quick or len(leaf.shape) > 1]
    found = Recording(training.size, np.zeros(0), [], MissingRows(rows), [], [], [], [])
    unions, every = [], max(1, steps // RECORDS)

    @functools.partial(jax.jit, static_argnums=0)
    def chosen(name: str, acc: jax.Array) -> jax.Array:
        selector = selector_factory(name)(density=density)
        return selector.select(acc, selector.init(layout))[0].indices

    def shadow(name: str, acc: jax.Array) -> np.ndarray:
        """The indices that a selector would select, without driving the training."""
        indices = np.asarray(chosen(name, acc))
        return indices[indices < training.size]

    def visit(step: int, acc: jax.Array, gradient: jax.Array, selections: Any) -> None:
        del gradient
        indices = (np.asarray(coo.indices) for coo in selections)
        unions.append(growth(indices, training.size) / training.size)
        is_recorded = step % every == every - 1
        if is_recorded:
            host = jax.device_get(selections)
            found.selections.append(jax.tree.map(lambda *x: np.stack(x), *host))
        if name == "scaled":
            return
        host = np.asarray(acc)
        found.thresholds.append(thresholds(host, density))
        if is_recorded:
            exact = largest(host, density)
            found.same.append(_measures.overlap(shadow("mstopk", acc), exact))
            if name == "text":
                found.missing.add(accumulator=host)
                found.rows.append((step, row_sums(host, training.layout, density)))
                kept = float(np.abs(host[shadow("adtopk", acc)]).sum())
                found.by_row.append(kept / float(np.abs(host[exact]).sum()))

    with quiet():
        training.train(steps, visit=visit)
    return found._replace(unions=np.array(unions))


def thresholds(acc: np.ndarray, density: float) -> tuple[float, float]:
    """The k-th magnitude, and its estimate from a normal distribution of equal moments."""
    k = max(1, round(density * acc.size))
    exact = np.partition(np.abs(acc), acc.size - k)[acc.size - k]
    quantile = -NormalDist().inv_cdf(k / acc.size / 2)
    return float(exact), float(abs(acc.mean()) + quantile * acc.std())


def row_sums(acc: np.ndarray, layout: list[Leaf], density: float) -> np.ndarray:
    """Sums of the magnitudes that ROW_CHOICES select in each row of ROWS_OF, ``[3, rows]``."""
    leaf = next(leaf for leaf in layout if leaf.name == ROWS_OF)
    selections = [np.arange(leaf.start, leaf.start + leaf.size)]
    for select in (_measures.layer_selection, _measures.row_selection):
        selections.append(select(acc, [leaf], density))
    rows = [(_measures.rows_of(x, leaf), np.abs(acc[x])) for x in selections]
    return np.stack([np.bincount(*each, leaf.rows) for each in rows])


def top_of_sum(step: PaddedCOO, workers: int, density: float) -> np.ndarray:
    """The indices of the top k of the sum of the first workers' selections."""
    sums = np.zeros(step.size + 1, np.float32)
    chosen, values = (np.asarray(x)[:workers].ravel() for x in (step.indices, step.values))
    np.add.at(sums, chosen, values)
    return largest(sums[:-1], density)
