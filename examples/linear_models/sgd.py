"""Stochastic gradient descent: the data determine which entries of a gradient are not 0."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_matrix

from sparse_collectives import PaddedCOO, transport

from .._data import InputError
from .data import Source
from .training import EXCHANGES, Fit, Model, Training
from .workers import OWN, SAME, Group


class Batch(NamedTuple):
    """The rows of one worker in one batch."""

    indices: jax.Array  # i32[c], the features that occur, ascending; n marks padding
    rows: jax.Array  # i32[m], the row of each nonzero; r marks padding
    slots: jax.Array  # i32[m], where its feature is in `indices`; c marks padding
    values: jax.Array  # f32[m]
    labels: jax.Array  # f32[r], -1 or 1; 0 for padding


class Batches(NamedTuple):
    """All batches, on the devices, with the same number of slots for all of them."""

    parts: list[Batch]  # each is OWN
    counts: list[int]  # rows of all workers together
    size: int
    fit: Fit
    largest_row: float  # the largest squared length


def make(source: Source, group: Group, rows: int) -> Batches:
    """Cuts a source into batches of ``rows`` rows for each worker; the last one may be shorter."""
    together = rows * group.workers
    starts = range(0, source.count, together)

    def taken(start: int) -> tuple[csr_matrix, np.ndarray]:
        return source.rows(*(min(at, source.count) for at in (start, start + rows)))

    made = [[pack(*taken(start + worker * rows)) for worker in group.mine] for start in starts]
    needs = [(len(b.indices), len(b.rows), row) for packed in made for b, row in packed]
    slots, nonzeros, largest_row = group.gathered(needs, np.float64).max(axis=0).tolist()
    shape = source.size, int(slots), int(nonzeros), rows
    parts, fits = [], []
    for packed in made:
        padded = [pad(batch, *shape) for batch, _ in packed]
        packed.clear()  # the devices have them now
        parts.append(group.own(padded))
        # The indices of all workers give the size of the unions.
        fits.append(_fit(group.gathered([b.indices for b in padded], np.int32), source.size))
    counts = [min(together, source.count - start) for start in starts]
    fit = Fit(int(slots), *np.max(fits, axis=0).tolist())
    return Batches(parts, counts, source.size, fit, largest_row)


def pack(matrix: csr_matrix, labels: np.ndarray) -> tuple[Batch, float]:
    """A batch without padding, and the largest squared length of a row."""
    row = np.repeat(np.arange(len(labels), dtype=np.int32), np.diff(matrix.indptr))
    indices, slots = np.unique(matrix.indices, return_inverse=True)
    squares = np.bincount(row, matrix.data.astype(np.float64) ** 2, minlength=1)
    values = matrix.data.astype(np.float32)
    batch = Batch(indices.astype(np.int32), row, slots.astype(np.int32), values, labels)
    return batch, float(squares.max())


def pad(batch: Batch, size: int, slots: int, nonzeros: int, rows: int) -> Batch:
    """The same batch with so many slots, nonzeros and rows."""
    lengths, marks = (slots, nonzeros, nonzeros, nonzeros, rows), (size, rows, slots, 0, 0)
    each = zip(batch, lengths, marks)
    return Batch(*(np.pad(x, (0, to - len(x)), constant_values=mark) for x, to, mark in each))


def _fit(everyone: np.ndarray, size: int) -> tuple[int, int, int]:
    """The slots for the union of one batch, from the indices ``i32[P, c]`` of all workers."""
    edges = np.minimum(np.arange(len(everyone) + 1) * -(-size // len(everyone)), size)
    union = np.unique(everyone)
    blocks = [np.diff(np.searchsorted(own, edges)) for own in everyone]
    regions = np.diff(np.searchsorted(union, edges))
    return max(1, np.max(blocks)), max(1, regions.max()), max(1, regions.sum())


class Weights(NamedTuple):
    """The weights ``scale f32[] * vector f32[n]``, so that shrinking them takes one product."""

    vector: jax.Array
    scale: jax.Array


def gradient(model: Model, weights: Weights, batch: Batch, count: jax.Array) -> PaddedCOO:
    """This worker's part of the gradient of the mean loss of ``count f32[]`` rows: O(c + m)."""
    values = model.slope(_margins(weights, batch), batch.labels) / count
    of_row = values.at[batch.rows].get(mode="fill", fill_value=0)
    slots = jnp.zeros(batch.indices.shape, jnp.float32)
    slots = slots.at[batch.slots].add(batch.values * of_row, mode="drop")
    return PaddedCOO(slots, batch.indices, weights.vector.shape[0])


def update(weights: Weights, total: PaddedCOO | jax.Array, rate, regularisation) -> Weights:
    """A step of ``rate f32[]`` against ``total``; O(slots), or O(n) if the total is dense."""
    scale = weights.scale * (1 - rate * regularisation)
    if isinstance(total, PaddedCOO):
        moved = weights.vector.at[total.indices].add(-rate / scale * total.values, mode="drop")
    else:
        moved = weights.vector - rate / scale * total
    return Weights(moved, scale)


def _margins(weights: Weights, batch: Batch) -> jax.Array:
    local = weights.scale * weights.vector.at[batch.indices].get(mode="fill", fill_value=0)
    products = batch.values * local.at[batch.slots].get(mode="fill", fill_value=0)
    margins = jnp.zeros(batch.labels.shape, jnp.float32)
    return margins.at[batch.rows].add(products, mode="drop", indices_are_sorted=True)


class Trainer(Training):
    """Gradient descent: step t has ``rate / (1 + rate * regularisation * t)``."""

    def __init__(self, group, model: Model, batches, exchange, *, rate, regularisation, seed):
        self._group, self._batches = group, batches
        self._regularisation, self._seed = regularisation, seed
        # By default 1 over the largest curvature of a row's loss.
        self._rate = rate or 1 / (model.curvature * max(batches.largest_row, 1e-12))
        if self._rate * regularisation >= 1:
            raise InputError("the rate times --regularisation must be below 1")

        def loss(weights: Weights, batch: Batch) -> jax.Array:
            losses = model.loss(_margins(weights, batch), batch.labels)
            return transport.psum(jnp.sum(losses), group.axis)

        def settled(weights: Weights) -> Weights:
            return Weights(weights.scale * weights.vector, jnp.ones_like(weights.scale))

        self._gradient = group.jit(lambda *given: gradient(model, *given), (SAME, OWN, SAME), OWN)
        self._update = group.jit(
            lambda *given: update(*given, regularisation), (SAME, SAME, SAME), SAME, donate=(0,)
        )
        self._loss = group.jit(loss, (SAME, OWN), SAME)
        self._square = group.jit(lambda w: w.scale**2 * jnp.vdot(w.vector, w.vector), (SAME,), SAME)
        self._settle = group.jit(settled, (SAME,), SAME, donate=(0,))
        made = EXCHANGES["sgd"][exchange](batches.fit, group.workers)
        super().__init__(group, made, batches.size, exchange, len(batches.parts))

    def objective(self) -> float:
        """The mean loss over all rows, plus the regularization."""
        # Resets the scale to 1 after each epoch, since its product would finally vanish.
        self._weights = self._settle(self._weights)
        sums = [float(np.asarray(self._loss(self._weights, x))) for x in self._batches.parts]
        square = float(np.asarray(self._square(self._weights)))
        return sum(sums) / sum(self._batches.counts) + self._regularisation / 2 * square

    @property
    def weights(self) -> np.ndarray:
        """The weights after an epoch, ``f32[n]``."""
        return np.asarray(self._weights.vector)

    def _start(self) -> None:
        size = self._batches.size
        self._weights = self._group.same(Weights(np.zeros(size, np.float32), np.float32(1)))
        self._steps = 0

    def _order(self, number: int) -> np.ndarray:
        return np.random.default_rng([self._seed, number]).permutation(len(self._batches.parts))

    def _step(self, at: int) -> None:
        part, count = self._batches.parts[at], np.float32(self._batches.counts[at])
        # A short batch moves less; otherwise each of its rows would count more than others.
        share = count / max(self._batches.counts)
        now = share * self._rate / (1 + self._rate * self._regularisation * self._steps)
        self._weights = self._timed(
            lambda: self._gradient(self._weights, part, count),
            lambda total: self._update(self._weights, total, np.float32(now)),
        )
        self._steps += 1
