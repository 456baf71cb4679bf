"""Shared by both methods: models, exchanges with slots for everything, and timed steps."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_collectives import PaddedCOO, ReduceInfo, SparseAllreduce, allreduce, transport
from sparse_collectives.allreduce import published

from .workers import OWN, SAME, Group

# Keeps a share that is a quotient of whole numbers from being rounded down to a slot less.
_ABOVE = 1 + 1e-9


class Model(NamedTuple):
    """Loss and slope of margins and labels ``f32[r]``; both are 0 for padding, whose label is 0."""

    loss: Callable[[jax.Array, jax.Array], jax.Array]
    slope: Callable[[jax.Array, jax.Array], jax.Array]
    curvature: float  # a bound of the second derivative


# The support vector machine has the squared hinge, LIBLINEAR's default.
MODELS = {
    "logistic": Model(
        loss=lambda z, y: y * y * jax.nn.softplus(-y * z),
        slope=lambda z, y: -y * jax.nn.sigmoid(-y * z),
        curvature=0.25,
    ),
    "svm": Model(
        loss=lambda z, y: y * y * jnp.square(jax.nn.relu(1 - y * z)),
        slope=lambda z, y: -2 * y * jax.nn.relu(1 - y * z),
        curvature=2.0,
    ),
}


class Fit(NamedTuple):
    """The numbers of slots that suffice for every batch of every worker."""

    selection: int  # of a gradient
    block: int  # of its entries in one of P equal ranges of indices
    region: int  # of the union of all gradients in such a range
    union: int  # of that union


def split_allgather(fit: Fit, workers: int) -> SparseAllreduce:
    """SSAR_Split_allgather with slots for the largest block and the largest region."""
    slack = _slack(fit, workers)
    fill = max(1.0, _ABOVE * fit.region * workers / (slack * fit.selection))
    return published.ssar_split_allgather(slack=slack, fill=fill)


def _slack(fit: Fit, workers: int) -> float:
    return max(1.0, _ABOVE * fit.block * workers / fit.selection)


def dense_allgather(workers: int) -> SparseAllreduce:
    """The dense counterpart of a sparse allgather: every worker sends its whole range."""

    def reduce(coo: PaddedCOO, state: tuple[()], *, axis: Any):
        width = -(-coo.size // workers)
        local = coo.indices - transport.axis_index(axis) * width
        local = jnp.where((coo.indices < coo.size) & (local >= 0), local, width)
        mine = jnp.zeros((width,), coo.values.dtype).at[local].set(coo.values, mode="drop")
        total = transport.all_gather(mine, axis).reshape(-1)[: coo.size]
        outside = jnp.sum((local >= width) & (coo.indices < coo.size), dtype=jnp.int32)
        words, delivered = jnp.float32(width * (workers - 1)), jnp.sum(total != 0, dtype=jnp.int32)
        return total, None, state, ReduceInfo(delivered, outside, jnp.float32(0), words, words)

    return SparseAllreduce(lambda size, axis_size: (), reduce)


# By method: for gradients, which share indices, and for coordinates, which have one owner.
EXCHANGES: dict[str, dict[str, Callable[[Any, int], SparseAllreduce]]] = {
    "sgd": {
        "dense": lambda fit, p: allreduce.dense(),
        "ssar_recursive_double": lambda fit, p: published.ssar_recursive_double(capacity=fit.union),
        "ssar_split_allgather": split_allgather,
        "dsar_split_allgather": lambda fit, p: published.dsar_split_allgather(slack=_slack(fit, p)),
        "topk_a": lambda fit, p: allreduce.topk_a(),
    },
    "scd": {
        "dense_allgather": lambda fit, p: dense_allgather(p),
        "dense": lambda fit, p: allreduce.dense(),
        "sparse_allgather": lambda fit, p: published.sparse_allgather(),
    },
}


class Training:
    """A training that continues from epoch to epoch, with its measurements in `run`.

    A method has ``_start()``, ``_order(epoch)``, ``_step()`` of one in it, and ``objective()``.
    """

    def __init__(self, group: Group, made: SparseAllreduce, size: int, name: str, steps: int):
        def reduce(coo: PaddedCOO, state: Any) -> tuple[Any, ...]:
            total, _, state, info = made.reduce(coo, state, axis=group.axis)
            return total, state, (info.words, info.delivered), info.overflow.reshape(1)

        self._reduce = group.jit(reduce, (OWN, SAME), (SAME, SAME, SAME, OWN))
        self._carried = group.same(jax.tree.map(np.asarray, made.init(size, group.workers)))
        self._taken: list[tuple[Any, ...]] = []
        # A step whose result is dropped, so that nothing is compiled while a clock runs.
        self._start()
        self._step(self._order(0)[0])
        self._start()
        # By epoch: seconds without the evaluation of the objective, words received by each worker,
        # and the mean number of entries in the total of a step.
        self.run = SimpleNamespace(exchange=name, steps=steps, objectives=[self.objective()])
        self.run.seconds, self.run.exchange_seconds = [], []
        self.run.words, self.run.delivered = [], []

    def epoch(self, most: int | None = None) -> None:
        """One pass over the batches or coordinates in a new order, or ``most`` steps of it."""
        run = self.run
        self._taken.clear()
        for what in self._order(len(run.seconds))[:most]:
            self._step(what)
        seconds, exchanged, counts, overflow = zip(*self._taken)
        if any(shard.data.any() for each in overflow for shard in each.addressable_shards):
            raise RuntimeError(f"{run.exchange}: an entry found no slot: its step has lost it")
        words, delivered = np.asarray(counts, np.float64).T
        run.seconds.append(sum(seconds))
        run.exchange_seconds.append(sum(exchanged))
        run.words.append(float(words.sum()))
        run.delivered.append(float(delivered.mean()))
        run.objectives.append(self.objective())

    def _timed(self, local: Callable[[], Any], update: Callable[[Any], Any]) -> Any:
        """One step in three programs, each waited for; returns the result of ``update``."""
        start = time.perf_counter()
        given = jax.block_until_ready(local())
        before = time.perf_counter()
        exchanged = jax.block_until_ready(self._reduce(given, self._carried))
        total, self._carried, counts, overflow = exchanged
        after = time.perf_counter()
        result = jax.block_until_ready(update(total))
        self._taken.append((time.perf_counter() - start, after - before, counts, overflow))
        return result
