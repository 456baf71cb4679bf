"""Random block coordinate descent: worker i moves features in the i-th of P equal ranges.

In a step it moves some of them, 100 in SparCML, each to the minimum of a bound of the objective
along it. Steps are disjoint by construction, so the exchange is an allgather. All processes have
the whole matrix and keep the margins of all rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.sparse import csc_matrix

from sparse_collectives import PaddedCOO

from .data import Source
from .training import EXCHANGES, Model, Training


class Problem(NamedTuple):
    """All rows of a source, with an empty column n for unused slots."""

    columns: csc_matrix
    labels: np.ndarray
    squares: np.ndarray  # f32[n + 1], the squared length of each column
    row_length: int  # nonzeros of the longest one


def make(source: Source, *_: Any) -> Problem:
    """The same problem in every process; the arguments for :mod:`.sgd` are ignored."""
    matrix, labels = source.rows(0, source.count)
    squares = np.bincount(matrix.indices, matrix.data.astype(np.float64) ** 2, source.size + 1)
    row_length = int(np.diff(matrix.indptr).max())
    matrix.resize(source.count, source.size + 1)
    return Problem(matrix.tocsc(), labels, squares.astype(np.float32), row_length)


def steps(curvature, problem: Problem, slopes, weights, picked, damping, regularisation):
    r"""The steps ``f32[k]`` of the coordinates ``picked i32[k]``, all from the current weights.

    With :math:`g_j` the derivative of the mean loss, computed from ``slopes f32[N]``, :math:`L_j`
    the bound of its second derivative, and :math:`\beta` the damping for coordinates that move at
    the same time,

    .. math:: d_j = - (g_j + \lambda w_j) / (\beta L_j + \lambda)
    """
    count = np.float32(len(problem.labels))
    first = problem.columns[:, picked].T @ slopes / count + regularisation * weights[picked]
    second = damping * curvature / count * problem.squares[picked]
    return (-first / (second + regularisation)).astype(np.float32)


def damping(row_length: int, block: int, owned: int, workers: int) -> float:
    """How much the bound grows with many at a time: section 4 of jmlr.org/papers/v17/15-001."""
    block, others = min(block, owned), max(1, owned - 1)
    parts = min(row_length, workers)
    within = 1 + (block - 1) * (row_length - 1) / others
    across = (block / owned - (block - 1) / others) * (parts - 1) / parts * row_length
    return within + max(0.0, across)


def occurring(squares: np.ndarray, workers: int) -> list[np.ndarray]:
    """For each worker the features ``i32`` of its range that occur."""
    features = np.flatnonzero(squares).astype(np.int32)
    edges = np.arange(1, workers) * -(-len(squares) // workers)
    return np.split(features, np.searchsorted(features, edges))


def schedule(owned: list[np.ndarray], block: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """The coordinates of each step, ``i32[steps, workers, block]``; ``size`` is padding."""
    length = -(-max(map(len, owned)) // block)
    picked = []
    for worker, own in enumerate(owned):
        order = np.random.default_rng([seed, epoch, worker]).permutation(own)
        order = np.pad(order, (0, length * block - len(order)), constant_values=size)
        picked.append(np.sort(order.reshape(length, block)))
    return np.stack(picked, axis=1)


class Trainer(Training):
    """Coordinate descent with ``block`` coordinates of a worker in a step."""

    def __init__(self, group, model: Model, problem, exchange, *, block, regularisation, seed):
        self._group, self._problem, self._regularisation = group, problem, regularisation
        self._size = problem.columns.shape[1] - 1
        owned = occurring(problem.squares[:-1], group.workers)
        counts = list(map(len, owned))
        factor = damping(problem.row_length, block, max(1, min(counts)), group.workers)
        self._steps = functools.partial(
            steps, model.curvature, problem, damping=factor, regularisation=regularisation
        )
        self._order = lambda epoch: schedule(owned, block, self._size, seed, epoch)
        self._loss, self._slope = jax.jit(model.loss), jax.jit(model.slope)
        made = EXCHANGES["scd"][exchange](None, group.workers)
        super().__init__(group, made, self._size, exchange, -(-max(counts) // block))

    def objective(self) -> float:
        """The mean loss over all rows, plus the regularization."""
        losses = np.asarray(self._loss(self.margins, self._problem.labels))
        return float(losses.mean() + self._regularisation / 2 * self._weights @ self._weights)

    @property
    def weights(self) -> np.ndarray:
        """The weights, ``f32[n]``."""
        return self._weights[:-1]

    def _start(self) -> None:
        self._weights = np.zeros(self._size + 1, np.float32)
        self.margins = np.zeros(len(self._problem.labels), np.float32)

    def _step(self, picked: np.ndarray) -> None:
        def local() -> PaddedCOO:
            slopes = np.asarray(self._slope(self.margins, self._problem.labels))
            mine = [picked[worker] for worker in self._group.mine]
            own = [self._steps(slopes, self._weights, each) for each in mine]
            return self._group.own([PaddedCOO(*pair, self._size) for pair in zip(own, mine)])

        def apply(total: PaddedCOO | jax.Array) -> None:
            # The schedule determines the indices at which a dense total may differ from 0.
            if not isinstance(total, PaddedCOO):
                indices = picked.reshape(-1)
                values = total.at[indices].get(mode="fill", fill_value=0)
                total = PaddedCOO(values, indices, self._size)
            indices, moved = np.asarray(total.indices), np.asarray(total.values)
            self._weights[indices] += moved
            self.margins += self._problem.columns[:, indices] @ moved

        self._timed(local, apply)
