"""Coordinate descent where each worker has the columns of its own features, and no others.

A step of coordinates changes the margins of the rows in which they occur, and these changes are
what is added up: sparse vectors over the rows, as short as the columns are. Weights stay with their
owner. As in :mod:`.coordinate_descent` otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import vstack

from sparse_collectives import PaddedCOO, transport

from . import columns as by_column
from . import exchange as exchanges
from .batches import Fit
from .columns import Columns
from .coordinate_descent import Schedule, Settings, damping, steps
from .data import Source
from .group import OWN, SAME, Group
from .models import Model
from .run import Clock, Run, exchange_of

# Rows of a source that are in memory with all their columns.
_ROWS = 10_000
# Steps that touch more rows than this share of all steps do take a dense vector of the rows.
_SHORT_STEPS = 0.9


class Problem(NamedTuple):
    """The matrix by columns, each with the owner of its feature.

    Attributes:
      columns: ``OWN``, a worker's range of ``ceil(n / P)`` columns.
      labels: ``f32[N]``.
      lengths: for each worker of this process, ``i32[width]``, nonzeros of its columns.
      row_length: nonzeros of the longest row.
      size: n.
    """

    columns: Columns
    labels: jax.Array
    lengths: dict[int, np.ndarray]
    row_length: int
    size: int


def problem_of(source: Source, group: Group) -> Problem:
    """The columns of the workers in this process, from rows that are read some at a time."""
    width = -(-source.size // group.workers)
    parts = {worker: [] for worker in group.mine}
    all_labels, row_length = [], 0
    for start in range(0, source.count, _ROWS):
        matrix, labels = source.rows(start, min(start + _ROWS, source.count))
        all_labels.append(labels)
        row_length = max(row_length, int(np.diff(matrix.indptr).max()))
        for worker, kept in parts.items():
            kept.append(matrix[:, worker * width : (worker + 1) * width])
    made = [by_column.of_matrix(vstack(kept, format="csr")) for kept in parts.values()]
    nonzeros = int(group.largest([max(len(columns.rows) for columns in made)])[0])
    # As many for all; nothing refers to what is added.
    placed = [
        Columns(
            np.pad(columns.starts, (0, width + 1 - len(columns.starts)), mode="edge"),
            *(np.pad(x, (0, nonzeros - len(x))) for x in (columns.rows, columns.values)),
        )
        for columns in made
    ]
    labels = group.same(np.concatenate(all_labels))
    lengths = [np.diff(columns.starts) for columns in placed]
    own = dict(zip(group.mine, lengths, strict=True))
    return Problem(group.own(placed), labels, own, row_length, source.size)


class Trainer:
    """A training that goes on from epoch to epoch; what it measures is in `run`."""

    def __init__(self, group: Group, model: Model, problem: Problem, exchange: str, s: Settings):
        self._group, self._problem = group, problem
        self._count = problem.labels.shape[0]
        width = -(-problem.size // group.workers)
        owned = {w: np.flatnonzero(x).astype(np.int32) for w, x in problem.lengths.items()}
        counts = [len(each) for each in owned.values()]
        most, fewest = group.largest([max(counts), -min(counts)])
        length = -(-int(most) // s.block)
        self._schedule = Schedule(owned, length=length, size=width, block=s.block, seed=s.seed)
        factor = damping(problem.row_length, s.block, max(1, -int(fewest)), group.workers)

        def local(weights, margins, columns: Columns, labels, picked, slots: int):
            moved = steps(
                *(model, columns, labels, margins),
                weights.at[picked].get(mode="fill", fill_value=0),
                picked,
                damping=factor,
                regularisation=s.regularisation,
            )
            changes = _changes(columns, picked, moved, slots, self._count)
            return weights.at[picked].add(moved, mode="drop"), changes

        def apply(margins, total: PaddedCOO | jax.Array):
            if isinstance(total, PaddedCOO):
                return (margins.at[total.indices].add(total.values, mode="drop"),)
            return (margins + total,)

        def objective(weights, margins, labels):
            square = transport.psum(jnp.vdot(weights, weights), group.axis)
            return (jnp.mean(model.loss(margins, labels)) + s.regularisation / 2 * square,)

        def whole(weights):
            return (transport.all_gather(weights, group.axis).reshape(-1),)

        self._apply = group.jit(apply, [SAME, SAME], [SAME], donate=[0])
        self._objective = group.jit(objective, [OWN, SAME, SAME], [SAME])
        self._whole = group.jit(whole, [OWN], [SAME])
        # Two lengths of messages: one that most steps fit, and one that all do.
        needs = np.sort(self._needs(self._schedule.epoch(0)))
        short = 1 << int(needs[int(_SHORT_STEPS * (length - 1))] - 1).bit_length()
        self._sizes = sorted({min(short, self._count), self._count})
        self._local, self._exchanges = {}, {}
        for slots in self._sizes:
            self._local[slots] = group.jit(
                lambda *args, slots=slots: local(*args, slots),
                [OWN, SAME, OWN, SAME, OWN],
                [OWN, OWN],
                donate=[0],
            )
            union = min(self._count, group.workers * slots)
            fit = Fit(selection=slots, block=slots, region=union, union=union)
            made = exchanges.MARGINS[exchange](fit, group.workers)
            self._exchanges[slots] = exchange_of(made, group, self._count)
        self._weights, self._margins = self._start(width)
        for slots in self._sizes:
            # Steps that are not kept, so that nothing is compiled while a clock runs.
            self._step(Clock(group), self._schedule.epoch(0)[0], slots)
        self._weights, self._margins = self._start(width)
        self.run = Run(exchange, [], [], [], [], [], length, np.zeros(0))
        self.run.objectives.append(self.objective())

    def objective(self) -> float:
        """The mean loss over all rows, and the regularisation."""
        args = self._weights, self._margins, self._problem.labels
        return float(np.asarray(self._objective(*args)[0]))

    def epoch(self, advance: Callable[[], None] = lambda: None, most: int | None = None) -> None:
        """A turn of every coordinate, or the first ``most`` steps of it."""
        clock, number = Clock(self._group), len(self.run.seconds)
        picked = self._schedule.epoch(number)
        for each, need in zip(picked[:most], self._needs(picked)[:most], strict=True):
            self._step(clock, each, next(size for size in self._sizes if need <= size))
            advance()
        clock.close(self.run)
        self.run.objectives.append(self.objective())

    def finished(self) -> Run:
        """What was measured, with the weights of all workers."""
        weights = np.asarray(self._whole(self._weights)[0])[: self._problem.size]
        return self.run._replace(weights=weights)

    def _start(self, width: int):
        zeros = [np.zeros(width, np.float32) for _ in self._group.mine]
        return self._group.own(zeros), self._group.same(np.zeros(self._count, np.float32))

    def _needs(self, picked: np.ndarray) -> np.ndarray:
        """Nonzeros in the columns of each step, of the worker that has most; N at most."""
        own = [
            np.append(lengths, 0)[picked[:, at]].sum(axis=1)
            for at, lengths in enumerate(self._problem.lengths.values())
        ]
        agreed = np.asarray(self._group.largest(np.max(own, axis=0).tolist()), np.int64)
        return np.clip(agreed, 1, self._count)

    def _step(self, clock: Clock, picked: np.ndarray, slots: int) -> None:
        own = self._group.own(list(picked))
        columns, labels = self._problem.columns, self._problem.labels

        def local():
            moved = self._local[slots](self._weights, self._margins, columns, labels, own)
            self._weights, changes = moved
            return changes

        (self._margins,) = clock.step(
            local, self._exchanges[slots], lambda total: self._apply(self._margins, total)
        )


def _changes(
    columns: Columns, picked: jax.Array, moved: jax.Array, slots: int, count: int
) -> PaddedCOO:
    """What steps ``moved f32[k]`` of the columns ``picked`` change in the margins of all rows."""

    def change(slot, value):
        return value * moved.at[slot].get(mode="fill", fill_value=0)

    if slots == count:

        def add(margins, slot, row, value, at):
            del at
            return margins.at[row].add(change(slot, value), mode="drop")

        values = by_column.fold(columns, picked, add, jnp.zeros((count,), jnp.float32))
        return PaddedCOO(values, jnp.arange(count, dtype=jnp.int32), count)

    def put(pairs, slot, row, value, at):
        rows, values = pairs
        return rows.at[at].set(row, mode="drop"), values.at[at].set(
            change(slot, value), mode="drop"
        )

    none = jnp.full((slots,), count, jnp.int32), jnp.zeros((slots,), jnp.float32)
    rows, values = by_column.fold(columns, picked, put, none)
    return PaddedCOO.from_pairs(jnp.minimum(rows, count), values, count)
