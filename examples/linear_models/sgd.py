"""Stochastic gradient descent whose steps touch the features of the batch and no others."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import PaddedCOO

from . import exchange as exchanges
from .batches import Batch, Batches
from .group import OWN, SAME, Group
from .models import Model
from .run import Clock, Run, exchange_of


class Weights(NamedTuple):
    """The weights ``scale * vector``: to shrink all of them takes one product.

    Attributes:
      vector: ``f32[n]``.
      scale: ``f32[]``.
    """

    vector: jax.Array
    scale: jax.Array


class Settings(NamedTuple):
    """What a training takes besides data and model.

    Attributes:
      rate: of the first step; step t has ``rate / (1 + rate * regularisation * t)``, and that of
        a batch with fewer rows as much less.
      regularisation: the factor of ``|w|^2 / 2`` in the objective.
      seed: of their order.
    """

    rate: float
    regularisation: float
    seed: int


def gradient(model: Model, weights: Weights, batch: Batch, count: jax.Array) -> PaddedCOO:
    """This worker's part of the gradient of the batch's mean loss, without the regularisation.

    Args:
      model: of which the loss is.
      weights: the weights.
      batch: of this worker.
      count: ``f32[]``, rows in the batch, those of all workers together.

    Returns:
      The gradient at the features that occur, in c slots. Cost: O(c + m); nothing of size n.
    """
    values = model.slope(_margins(weights, batch), batch.labels) / count
    of_row = values.at[batch.rows].get(mode="fill", fill_value=0)
    slots = jnp.zeros(batch.indices.shape, jnp.float32)
    slots = slots.at[batch.slots].add(batch.values * of_row, mode="drop")
    return PaddedCOO(slots, batch.indices, weights.vector.shape[0])


def update(
    weights: Weights, total: PaddedCOO | jax.Array, rate: jax.Array, regularisation: float
) -> Weights:
    """A step of ``rate f32[]`` against ``total``; O(slots), or O(n) where the total is dense."""
    scale = weights.scale * (1 - rate * regularisation)
    if isinstance(total, PaddedCOO):
        moved = weights.vector.at[total.indices].add(-rate / scale * total.values, mode="drop")
    else:
        moved = weights.vector - rate / scale * total
    return Weights(moved, scale)


def loss(model: Model, weights: Weights, batch: Batch) -> jax.Array:
    """The sum of the losses of this worker's rows of a batch, ``f32[]``."""
    return jnp.sum(model.loss(_margins(weights, batch), batch.labels))


def _margins(weights: Weights, batch: Batch) -> jax.Array:
    local = weights.scale * weights.vector.at[batch.indices].get(mode="fill", fill_value=0)
    products = batch.values * local.at[batch.slots].get(mode="fill", fill_value=0)
    margins = jnp.zeros(batch.labels.shape, jnp.float32)
    return margins.at[batch.rows].add(products, mode="drop", indices_are_sorted=True)


class Trainer:
    """A training that goes on from epoch to epoch; what it measures is in `run`."""

    def __init__(
        self, group: Group, model: Model, batches: Batches, exchange: str, settings: Settings
    ):
        from sparse_collectives import transport

        self._group, self._batches, self._settings = group, batches, settings
        size = batches.size
        self._gradient = group.jit(
            lambda w, batch, count: (gradient(model, w, batch, count),), [SAME, OWN, SAME], [OWN]
        )
        made = exchanges.GRADIENTS[exchange](batches.fit, group.workers)
        self._exchange = exchange_of(made, group, size)
        self._update = group.jit(
            lambda w, total, rate: (update(w, total, rate, settings.regularisation),),
            [SAME, SAME, SAME],
            [SAME],
            donate=[0],
        )
        self._loss = group.jit(
            lambda w, batch: (transport.psum(loss(model, w, batch), group.axis),),
            [SAME, OWN],
            [SAME],
        )
        self._square = group.jit(
            lambda w: (w.scale**2 * jnp.vdot(w.vector, w.vector),), [SAME], [SAME]
        )
        # The scale is 1 again for each epoch: its product would vanish in the end.
        self._settle = group.jit(
            lambda w: (Weights(w.scale * w.vector, jnp.ones_like(w.scale)),),
            [SAME],
            [SAME],
            donate=[0],
        )
        start = Weights(np.zeros(size, np.float32), np.ones((), np.float32))
        self._steps = 0
        # One step that is not kept, so that nothing is compiled while a clock runs.
        self._weights = group.same(start)
        self._step(Clock(group), 0)
        self._weights = group.same(start)
        self._steps = 0
        self.run = Run(exchange, [], [], [], [], [], len(batches.parts), np.zeros(0))
        self.run.objectives.append(self.objective())

    def objective(self) -> float:
        """The mean loss over all rows, and the regularisation."""
        sums = [
            float(np.asarray(self._loss(self._weights, part)[0])) for part in self._batches.parts
        ]
        square = float(np.asarray(self._square(self._weights)[0]))
        return sum(sums) / sum(self._batches.counts) + self._settings.regularisation / 2 * square

    def epoch(self, advance: Callable[[], None] = lambda: None, most: int | None = None) -> None:
        """One pass over the batches, in an order of its own, or the first ``most`` of them."""
        clock, number = Clock(self._group), len(self.run.seconds)
        order = np.random.default_rng([self._settings.seed, number])
        for at in order.permutation(len(self._batches.parts))[:most]:
            self._step(clock, at)
            advance()
        clock.close(self.run)
        (self._weights,) = self._settle(self._weights)
        self.run.objectives.append(self.objective())

    def _step(self, clock: Clock, at: int) -> None:
        rate, regularisation = self._settings.rate, self._settings.regularisation
        part, count = self._batches.parts[at], np.float32(self._batches.counts[at])
        # A short batch moves less, or each of its rows would count for more than another.
        share = count / max(self._batches.counts)
        now = np.float32(share * rate / (1 + rate * regularisation * self._steps))
        (self._weights,) = clock.step(
            lambda: self._gradient(self._weights, part, count)[0],
            self._exchange,
            lambda total: self._update(self._weights, total, now),
        )
        self._steps += 1

    def finished(self) -> Run:
        """What was measured, with the weights."""
        return self.run._replace(weights=np.asarray(self._weights.vector))


def default_rate(model: Model, batches: Batches) -> float:
    """1 over the largest curvature of a row's loss; a hinge has none, and counts as 1."""
    curvature = 1.0 if model.curvature is None else model.curvature
    return 1 / (curvature * max(batches.largest_row, 1e-12))
