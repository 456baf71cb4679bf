"""ADTopk's selection with three allreduces: rows with an update, words, and accuracy.

The paper has an allgather, whose words grow with the workers, and leaves a scalable exchange to the
future. Ok-Topk selects again from all rows together, and ``row_topk`` from each row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

import optax_ext
from sparse_collectives import allreduce, select

from ..training import _simulated_training as training
from ..training._recorded_training import MOMENTUM, schedule
from ..training._simulated_training import AXIS, Variant
from ._runs import BATCH, DENSITY, NOISY_RATE, STEPS, WORKERS, noisy_digits

# Rows are counted after this share of the steps.
_LATE = 0.5


class Trained(NamedTuple):
    """The end of a training."""

    accuracy: float
    # The mean share of the rows of which entries wait and none is in the update, in a late step.
    missed: float
    # The words that each worker received in a step.
    words: float


def _exchange(name: str) -> optax.GradientTransformation:
    selector = select.published.adtopk(density=DENSITY)
    exchanges = {
        "topk_a": allreduce.topk_a(),
        "ok_topk": allreduce.ok_topk(density=DENSITY),
        "row_topk": allreduce.row_topk(density=DENSITY),
    }
    return optax_ext.sparse_allreduce(selector, exchanges[name], axis=AXIS)


@functools.lru_cache(maxsize=4)
def _program(name: str, steps: int) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """What steps carry at first, and a compiled training, the same for all seeds."""
    # Without momentum, so that a parameter moves only if its entry is in the update.
    rate = schedule(NOISY_RATE / (1 - MOMENTUM), steps)
    variant = Variant(_exchange(name), optax.sgd(rate))
    one = training.step_of(noisy_digits(0), variant, WORKERS, lax.map)

    def step(carry: Any, batches: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        after, (_, (words, *_)) = one(carry, batches)
        moved = _rows_of(jax.tree.map(lambda x, y: x != y, carry[0], after[0]))
        # A row whose gradients are all 0 delivers nothing; entries that wait are in residuals.
        kept = optax_ext.get_state(after[1]).residual
        kept = jnp.any(kept != 0, axis=range(kept.ndim - 1)).astype(jnp.float32)
        waiting = _rows_of(ravel_pytree(carry[0])[1](kept))
        return after, (jnp.mean(waiting & ~moved), words)

    scanned = jax.jit(lambda carry, batches: lax.scan(step, carry, batches))
    return functools.partial(training.start_of, variant, workers=WORKERS), scanned


@functools.lru_cache(maxsize=16)
def _trained(name: str, seed: int, quick: bool) -> Trained:
    task, steps = noisy_digits(seed), STEPS[not quick]
    start, scanned = _program(name, steps)
    chosen = training.order_of(task, steps=steps, batch=BATCH, seed=seed)
    batches = task.batch_of(chosen.reshape(steps, WORKERS, BATCH // WORKERS))
    carry, (missed, words) = scanned(start(task.init(seed)), batches)
    late = np.asarray(missed)[int(_LATE * steps) :]
    return Trained(task.evaluate(carry[0]), float(late.mean()), float(np.mean(words)))


def _rows_of(params: Any) -> jax.Array:
    """Whether each row of the layers has an entry, ``bool[rows]``; the last axis numbers rows."""

    def of_layer(layer: jax.Array) -> jax.Array:
        return jnp.any(layer.reshape(-1, layer.shape[-1] if layer.ndim > 1 else 1) != 0, axis=0)

    return jnp.concatenate([of_layer(layer) for layer in jax.tree.leaves(params)])


def _compared(seed: int, quick: bool) -> dict[str, float]:
    gathered, ok, rows = (_trained(x, seed, quick) for x in ("topk_a", "ok_topk", "row_topk"))
    return {
        "row_topk: rows missed": rows.missed,
        "allgather: rows missed": gathered.missed,
        "ok_topk: rows missed": ok.missed,
        "words / words of an allgather": rows.words / gathered.words,
        "words / words of ok_topk": rows.words / ok.words,
        "points above an allgather": 100 * (rows.accuracy - gathered.accuracy),
        "points above ok_topk": 100 * (rows.accuracy - ok.accuracy),
        "row_topk, %": 100 * rows.accuracy,
    }
