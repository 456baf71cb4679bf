"""Measures of a selection: its overlap with another, and the rows it misses."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from sparse_collectives import Layout
from sparse_collectives.select.published import adtopk

# The densities in the table of missing rows.
DENSITIES = (0.001, 0.005, 0.01, 0.02, 0.05)


class Leaf(NamedTuple):
    """One parameter in the flat buffer: its path in the tree, and the index of its first entry.

    ``axis`` counts its rows; a leaf of one dimension is one row.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    axis: int
    size = property(lambda self: int(np.prod(self.shape)))
    rows = property(lambda self: self.shape[self.axis] if len(self.shape) > 1 else 1)


def overlap(selected: np.ndarray, exact: np.ndarray) -> float:
    """The share of the exact selection that was selected, from the indices of both."""
    return np.intersect1d(selected, exact).size / max(exact.size, 1)


def largest(x: np.ndarray, density: float) -> np.ndarray:
    """The indices of the k largest magnitudes, k = max(1, round(density n)), without zeros."""
    k = min(x.size, max(1, round(density * x.size)))
    chosen = np.argpartition(np.abs(x), x.size - k)[x.size - k :]
    return chosen[x[chosen] != 0]


def layer_selection(x: np.ndarray, layout: Sequence[Leaf], density: float) -> np.ndarray:
    """Plain top-k of each leaf, with the k of the leaf; ADTopk calls it traditional top-k."""
    parts = [leaf.start + largest(x[leaf.start :][: leaf.size], density) for leaf in layout]
    return np.concatenate(parts)


def rows_of(indices: np.ndarray, leaf: Leaf) -> np.ndarray:
    """The row of each of some indices into the flat buffer, all within the leaf."""
    if len(leaf.shape) < 2:
        return np.zeros_like(indices)
    return np.unravel_index(indices - leaf.start, leaf.shape)[leaf.axis]


def missing_rows(selected: np.ndarray, layout: Sequence[Leaf]) -> np.ndarray:
    """The number of rows of each leaf in which nothing was selected, padding aside."""
    missing = []
    for leaf in layout:
        inside = selected[(selected >= leaf.start) & (selected < leaf.start + leaf.size)]
        missing.append(leaf.rows - np.unique(rows_of(inside, leaf)).size)
    return np.asarray(missing)


def row_selection(x: np.ndarray, layout: Sequence[Leaf], density: float) -> np.ndarray:
    """ADTopk with its k for each row, along the row axis of each leaf."""
    chosen = []
    for leaf in layout:
        select, state = _compiled_adtopk(leaf.shape, leaf.axis, density)
        coo, _, info = select(x[leaf.start :][: leaf.size], state)
        chosen.append(leaf.start + np.asarray(coo.indices)[: int(info.selected)])
    return np.concatenate(chosen)


@functools.cache
def _compiled_adtopk(shape, axis, density):
    selector = adtopk(density=density, row_axis=axis)
    return jax.jit(selector.select), selector.init(Layout((shape,)))


# Add further selections to compare here: functions of (x, layout, density), to flat indices.
SELECTIONS = {
    "top-k of each layer": layer_selection,
    "top-k of all": lambda x, layout, density: largest(x, density),
    "adtopk": row_selection,
    # The rest is missed by any selection: rows of zeros, such as characters not seen yet.
    "every nonzero entry": lambda x, layout, density: np.flatnonzero(x),
}


class MissingRows:
    """The rows that each of SELECTIONS misses, over the steps of a run."""

    def __init__(self, layout: Sequence[Leaf]):
        self.layout = layout
        self.rows = np.array([leaf.rows for leaf in layout])
        self.counts: dict[tuple[str, str, float], list[np.ndarray]] = {}

    def add(self, **vectors: np.ndarray) -> None:
        """Takes the vectors of one step by their source: accumulator, gradient."""
        for source, x in vectors.items():
            for selection, choose in SELECTIONS.items():
                for density in DENSITIES:
                    missing = missing_rows(choose(x, self.layout, density), self.layout)
                    self.counts.setdefault((source, selection, density), []).append(missing)

    def rates(self, source: str, selection: str) -> dict[str, list[float]]:
        """Mean rates over the steps, for each density: of all rows, of matrices, of each leaf.

        "mean of matrices" weighs all leaves of two or more dimensions equally.
        """
        counts = np.array([np.mean(self.counts[source, selection, d], 0) for d in DENSITIES])
        shares = counts / self.rows
        matrices = [len(leaf.shape) > 1 for leaf in self.layout]
        rates = {
            "all rows": counts.sum(1) / self.rows.sum(),
            "mean of matrices": shares[:, matrices].mean(1),
        }
        rates |= {leaf.name: shares[:, i] for i, leaf in enumerate(self.layout)}
        return {name: rate.tolist() for name, rate in rates.items()}
