"""Random block coordinate descent: each worker moves coordinates of its own, and sends its steps.

Worker i owns the i-th of P equal ranges of features. In a step it takes some of them, 100 in
SparCML, and moves each to where a bound of the objective along it has its minimum. The steps are
disjoint by construction, so the exchange is an allgather. All workers have the whole matrix and
follow the margins of all rows; in :mod:`.sharded` each has its own columns only.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import PaddedCOO

from . import columns as by_column
from . import exchange as exchanges
from .columns import Columns
from .data import Source
from .group import OWN, SAME, Group
from .models import Model
from .run import Clock, Run, exchange_of


class State(NamedTuple):
    """What is the same on all workers.

    Attributes:
      weights: ``f32[n]``.
      margins: ``f32[N]``, the matrix times the weights.
    """

    weights: jax.Array
    margins: jax.Array


class Settings(NamedTuple):
    """What a training takes besides data and model.

    Attributes:
      block: coordinates of a worker in a step.
      regularisation: the factor of ``|w|^2 / 2`` in the objective.
      seed: of the order of the coordinates.
    """

    block: int
    regularisation: float
    seed: int


def steps(
    model: Model,
    columns: Columns,
    labels: jax.Array,
    margins: jax.Array,
    weights: jax.Array,
    picked: jax.Array,
    *,
    damping: float,
    regularisation: float,
) -> jax.Array:
    r"""The steps of some coordinates, from where all of them are now.

    With :math:`g_j` the derivative of the mean loss and :math:`L_j` the bound of its second one,
    and :math:`\beta` for the coordinates that move at the same time,

    .. math:: d_j = - (g_j + \lambda w_j) / (\beta L_j + \lambda)

    Args:
      model: of which the loss is; it has a curvature.
      columns: the matrix ``[N, n]``.
      labels: ``f32[N]``.
      margins: ``f32[N]``.
      weights: ``f32[k]``, of the coordinates.
      picked: ``i32[k]``, the coordinates; n where there is none, which does not move.
      damping: beta.
      regularisation: lambda.

    Returns:
      ``f32[k]``. Cost: O(nonzeros of the columns).

    References:
      Wright, `Coordinate descent algorithms <https://doi.org/10.1007/s10107-015-0892-3>`_, 2015.
    """

    def add(sums, slot, row, value, at):
        del at
        slope = model.slope(
            margins.at[row].get(mode="fill", fill_value=0),
            labels.at[row].get(mode="fill", fill_value=0),
        )
        first, second = sums
        return first.at[slot].add(value * slope, mode="drop"), second.at[slot].add(
            value * value, mode="drop"
        )

    nothing = jnp.zeros(picked.shape, jnp.float32)
    first, second = by_column.fold(columns, picked, add, (nothing, nothing))
    count = labels.shape[0]
    bound = damping * (model.curvature / count) * second + regularisation
    moved = -(first / count + regularisation * weights) / bound
    return jnp.where(second > 0, moved, 0.0)


def damping(row_length: int, block: int, owned: int, workers: int) -> float:
    """How much the bound grows because coordinates move at the same time, at least 1.

    Args:
      row_length: omega, the nonzeros of the longest row.
      block: tau, coordinates that a worker moves.
      owned: s, coordinates that a worker has.
      workers: P.

    References:
      Richtarik and Takac, `Distributed coordinate descent method for learning with big data
      <https://jmlr.org/papers/v17/15-001.html>`_, JMLR 2016: section 4, with at most
      min(omega, P) workers to a row.
    """
    block, others = min(block, owned), max(1, owned - 1)
    parts = min(row_length, workers)
    within = 1 + (block - 1) * (row_length - 1) / others
    across = (block / owned - (block - 1) / others) * (parts - 1) / parts * row_length
    return within + max(0.0, across)


class Schedule:
    """Which coordinates move in which step: each worker's own, in an order of the seed."""

    def __init__(
        self, owned: Mapping[int, np.ndarray], *, length: int, size: int, block: int, seed: int
    ):
        """The order of the coordinates of some workers.

        Args:
          owned: for each of the workers, by number, its coordinates that occur, ``i32``.
          length: steps of an epoch, in which each of them has its turn, with any worker.
          size: what to write where there is no coordinate.
          block: coordinates of a worker in a step.
          seed: of the order.
        """
        self._owned, self._size, self._block, self._seed = owned, size, block, seed
        self.length = length

    def epoch(self, number: int) -> np.ndarray:
        """``i32[steps, workers, block]``, ascending in each block, ``size`` where there is none."""
        picked = []
        for worker, owned in self._owned.items():
            order = np.random.default_rng([self._seed, number, worker]).permutation(owned)
            # Blocks that are not full come last.
            room = self.length * self._block - len(order)
            order = np.pad(order, (0, room), constant_values=self._size)
            picked.append(np.sort(order.reshape(self.length, self._block)))
        return np.stack(picked, axis=1)


def occurring(counts: np.ndarray, workers: int) -> dict[int, np.ndarray]:
    """For each worker, the features of its range that occur, of ``counts i32[n]`` nonzeros."""
    width = -(-len(counts) // workers)
    return {
        worker: np.flatnonzero(counts[start : start + width]).astype(np.int32) + np.int32(start)
        for worker, start in enumerate(range(0, workers * width, width))
    }


class Trainer:
    """A training that goes on from epoch to epoch; what it measures is in `run`."""

    def __init__(self, group: Group, model: Model, problem: "Problem", exchange: str, s: Settings):
        self._group, self._problem, self._settings = group, problem, s
        rows, size = problem.labels.shape[0], problem.columns.starts.shape[0] - 1
        owned = occurring(problem.lengths, group.workers)
        most, least = (pick(map(len, owned.values())) for pick in (max, min))
        length = -(-most // s.block)
        self._schedule = Schedule(owned, length=length, size=size, block=s.block, seed=s.seed)
        factor = damping(problem.row_length, s.block, max(1, least), group.workers)

        def local(state: State, columns: Columns, labels: jax.Array, picked: jax.Array):
            weights = state.weights.at[picked].get(mode="fill", fill_value=0)
            moved = steps(
                *(model, columns, labels, state.margins, weights, picked),
                damping=factor,
                regularisation=s.regularisation,
            )
            return (PaddedCOO(moved, picked, size),)

        def apply(state: State, columns: Columns, total: PaddedCOO | jax.Array, picked: jax.Array):
            if isinstance(total, PaddedCOO):
                moved, picked = total.values, total.indices
            else:  # where a dense total is not 0, everyone knows from the schedule
                picked = picked.reshape(-1)
                moved = total.at[picked].get(mode="fill", fill_value=0)

            def add(margins, slot, row, value, at):
                del at
                step = moved.at[slot].get(mode="fill", fill_value=0)
                return margins.at[row].add(value * step, mode="drop")

            margins = by_column.fold(columns, picked, add, state.margins)
            return (State(state.weights.at[picked].add(moved, mode="drop"), margins),)

        def objective(state: State, labels: jax.Array):
            mean = jnp.mean(model.loss(state.margins, labels))
            return (mean + s.regularisation / 2 * jnp.vdot(state.weights, state.weights),)

        self._local = group.jit(local, [SAME, SAME, SAME, OWN], [OWN])
        made = exchanges.COORDINATES[exchange](group.workers)
        self._exchange = exchange_of(made, group, size)
        self._apply = group.jit(apply, [SAME, SAME, SAME, SAME], [SAME], donate=[0])
        self._objective = group.jit(objective, [SAME, SAME], [SAME])
        start = State(np.zeros(size, np.float32), np.zeros(rows, np.float32))
        # One step that is not kept, so that nothing is compiled while a clock runs.
        self._state = group.same(start)
        self._step(Clock(group), self._schedule.epoch(0)[0])
        self._state = group.same(start)
        self.run = Run(exchange, [], [], [], [], [], self._schedule.length, np.zeros(0))
        self.run.objectives.append(self.objective())

    def objective(self) -> float:
        """The mean loss over all rows, and the regularisation."""
        return float(np.asarray(self._objective(self._state, self._problem.labels)[0]))

    def epoch(self, advance: Callable[[], None] = lambda: None, most: int | None = None) -> None:
        """A turn of every coordinate, or the first ``most`` steps of it."""
        clock, number = Clock(self._group), len(self.run.seconds)
        for picked in self._schedule.epoch(number)[:most]:
            self._step(clock, picked)
            advance()
        clock.close(self.run)
        self.run.objectives.append(self.objective())

    def finished(self) -> Run:
        """What was measured, with the weights."""
        return self.run._replace(weights=np.asarray(self._state.weights))

    def _step(self, clock: Clock, picked: np.ndarray) -> None:
        own = self._group.own([picked[worker] for worker in self._group.mine])
        columns, labels = self._problem.columns, self._problem.labels
        (self._state,) = clock.step(
            lambda: self._local(self._state, columns, labels, own)[0],
            self._exchange,
            lambda total: self._apply(self._state, columns, total, picked),
        )


class Problem(NamedTuple):
    """All rows, on every worker.

    Attributes:
      columns: the matrix.
      labels: ``f32[N]``.
      lengths: ``i32[n]``, nonzeros of each column, a NumPy array.
      row_length: nonzeros of the longest row.
    """

    columns: Columns
    labels: jax.Array
    lengths: np.ndarray
    row_length: int


def problem_of(source: Source, group: Group) -> Problem:
    """The whole of a source, on the devices."""
    matrix, labels = source.rows(0, source.count)
    columns = by_column.of_matrix(matrix)
    return Problem(
        columns=group.same(columns),
        labels=group.same(labels),
        lengths=np.diff(columns.starts),
        row_length=int(np.diff(matrix.indptr).max()),
    )
