"""What one training with top-k error feedback shows: its unions, selections and accumulators.

Several claims look at the same training, so it is made once for a seed and kept.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import Layout, PaddedCOO, select

from ..training import _recorded_training as training
from ..training._measures import MissingRows, overlap
from ..training._recorded_tasks import recorded_runs
from ..training._unions import growth
from ..training.load_balance import HARD_LAYER

# Of the two runs that Ok-Topk reports: VGG-16 on 16 workers, an LSTM on 32.
WORKERS = {"images": 16, "text": 32}
DENSITIES = {"images": 0.01, "text": 0.02}
# Quick and full; where one layer is scaled, always the first.
STEPS = {"images": (20, 100), "text": (8, 30)}
RECORDS = 8
FACTOR = 100.0


class Recording(NamedTuple):
    """A training of a small VGG on digits, or of an LSTM on characters.

    Attributes:
      size: n.
      unions: distinct indices in the selections of the first worker, the first two, and so on,
        at each step, / n: ``[steps, P]``.
      selections: ``[P, c]`` of some steps.
      missing: the rows in which top-k selects nothing, of some accumulators.
      same: the share of the exact top-k that MSTopK selects, at some steps.
      by_row: the sum of magnitudes that ADTopk selects, / that of top-k, at some steps.
    """

    size: int
    unions: np.ndarray
    selections: list[PaddedCOO]
    missing: MissingRows
    same: list[float]
    by_row: list[float]


@functools.lru_cache(maxsize=3)
def recording(name: str, seed: int, quick: bool, hard: bool = False) -> Recording:
    """Trains once.

    Args:
      name: images or text.
      seed: of parameters and batches.
      quick: a fifth of the steps.
      hard: the gradient of one layer is a hundred times as large before the selection.
    """
    given = argparse.Namespace(text=None, images=None, batch=2 if name == "text" else 4, seed=seed)
    given.density_images, given.density_text = DENSITIES["images"], DENSITIES["text"]
    run = next(run for run in recorded_runs(given) if run.name == name)
    workers, steps = WORKERS[name], STEPS[name][0 if quick or hard else 1]
    task = run.make_task(workers)
    layout = training.layout_of(task.params)
    size = sum(leaf.size for leaf in layout)
    k = max(1, round(run.density * size))
    units = None
    if hard:
        scaled = next(leaf for leaf in layout if leaf.name == HARD_LAYER[name])
        units = jnp.ones(size).at[scaled.start : scaled.start + scaled.size].set(FACTOR)
    shadows = _shadows(run.density, Layout.of(task.params))
    found = Recording(size, np.zeros(0), [], MissingRows(layout), [], [])
    unions, every = [], max(1, steps // RECORDS)

    def visit(step: int, acc: jax.Array, gradient: jax.Array) -> None:
        del gradient
        if step % every == every - 1 and not hard:
            host = np.asarray(acc)
            found.missing.add(accumulator=host)
            mstopk, adtopk = shadows(acc)
            exact = np.argpartition(np.abs(host), size - k)[size - k :]
            found.same.append(overlap(mstopk, exact[host[exact] != 0]))
            kept = float(np.abs(host[adtopk]).sum())
            found.by_row.append(kept / float(np.abs(host[exact]).sum()))

    def visit_all(step: int, selections: Any) -> None:
        unions.append(growth((np.asarray(coo.indices) for coo in selections), size) / size)
        if step % every == every - 1:
            host = jax.device_get(selections)
            found.selections.append(jax.tree.map(lambda *x: np.stack(x), *host))

    training.train(
        task,
        density=run.density,
        workers=workers,
        steps=steps,
        order="before",
        visit=visit,
        visit_all=visit_all,
        units=units,
    )
    return found._replace(unions=np.array(unions))


def _shadows(density: float, layout: Layout) -> Callable[[jax.Array], list[np.ndarray]]:
    """The indices that MSTopK and ADTopk select, which do not drive the training."""
    selectors = select.mstopk(density=density), select.adtopk(density=density)
    chosen = jax.jit(lambda acc: [s.select(acc, s.init(layout))[0].indices for s in selectors])

    def indices(acc: jax.Array) -> list[np.ndarray]:
        return [x[x < acc.shape[0]] for x in jax.device_get(chosen(acc))]

    return indices
