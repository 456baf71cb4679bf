"""Training with top-k error feedback, whose accumulators are there to look at.

Each worker adds its gradient to its residual, sends the exact top-k of the
sum and keeps the rest; the mean of what was sent goes to the optimizer. That is error feedback by
the book: it depends on no allreduce and on none of the selectors that are measured.

The learning rate is applied in one of two places. `before` accumulation, as in algorithm 2 of
Ok-Topk: when the rate has fallen, what is new is small beside what the residual holds from before.
Or `behind` it, in SGD with momentum, which leaves the accumulators in the units of the gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from sparse_collectives import PaddedCOO, Selector, select

from ._measures import Leaf

ORDERS = ("before", "behind")
MOMENTUM = 0.9


class Task(NamedTuple):
    """A model, its data and its optimizer.

    Attributes:
      params: the initial parameters.
      loss: ``loss(params, batch)``, the mean over a worker's batch.
      stream: yields the batches of all workers, with a leading axis of P.
      validate: ``validate(params)``, loss and accuracy on data that training does not see.
      rate: the peak learning rate for SGD with momentum.
      clip: the largest norm of a worker's gradient.
    """

    params: Any
    loss: Callable[[Any, Any], jax.Array]
    stream: Iterator[Any]
    validate: Callable[[Any], dict[str, float]]
    rate: float
    clip: float


class Curve(NamedTuple):
    """What the training run itself did.

    Attributes:
      before: loss and accuracy on data that training does not see.
      after: the same, at the end.
      losses: the training loss of each step.
      passed: entries of worker 0 that passed the threshold of each step, / k.
    """

    before: dict[str, float]
    after: dict[str, float]
    losses: list[float]
    passed: list[float]


def layout_of(params: Any) -> list[Leaf]:
    """Where each leaf is in the flat buffer; rows are output channels, or words of an embedding."""
    leaves, start = [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves.append(Leaf(name, leaf.shape, start, 0 if "embedding" in name else -1))
        start += leaf.size
    return leaves


def train(
    task: Task,
    *,
    density: float,
    workers: int,
    steps: int,
    order: str,
    visit: Callable[[int, jax.Array, jax.Array], None],
    selector: Selector | None = None,
    visit_all: Callable[[int, Sequence[PaddedCOO]], None] | None = None,
    units: jax.Array | None = None,
) -> Curve:
    """Trains, and calls ``visit(step, accumulator, gradient)`` of worker 0 at every step.

    Both are ``f32[n]``, laid out as in :func:`layout_of`. The order is one of ORDERS. The
    selector that drives the training is the exact top-k by default. ``visit_all(step,
    selections)`` gets what each worker sends.

    ``units``, ``f32[n]``, multiplies the gradient before the accumulation; what is sent is divided
    by it before the optimizer sees it. Only which entries are sent depends on it.
    """
    before = order == "before"
    # Without momentum the same distance takes a rate larger by what momentum sums up.
    rate = schedule(task.rate / (1 - MOMENTUM) if before else task.rate, steps)
    tx = optax.sgd(1.0) if before else optax.sgd(rate, momentum=MOMENTUM)
    flat, unravel = ravel_pytree(task.params)
    selector = select.topk(density=density) if selector is None else selector
    k = max(1, round(density * flat.size))

    @jax.jit
    def work(params, residual, state, batch, step):
        loss, gradient = jax.value_and_grad(task.loss)(params, batch)
        gradient = ravel_pytree(gradient)[0]
        gradient *= jnp.minimum(1, task.clip / jnp.linalg.norm(gradient))
        if before:
            gradient = gradient * rate(step)
        if units is not None:
            gradient = gradient * units
        acc = residual + gradient
        coo, state, info = selector.select(acc, state)
        sent = coo.to_dense()
        kept = acc - sent
        if units is not None:
            sent = sent / units
        return loss, gradient, acc, kept, state, coo, sent, info.selected + info.overflow

    @jax.jit
    def apply(params, opt_state, sent):
        updates, opt_state = tx.update(unravel(jnp.stack(sent).mean(0)), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = task.params, tx.init(task.params)
    residuals = [jnp.zeros_like(flat)] * workers
    states = [selector.init(flat.size)] * workers
    untrained, losses, counts = task.validate(params), [], []
    for step in range(steps):
        batch = next(task.stream)
        loss, gradients, accs, residuals, states, coos, sent, passed = zip(
            *(
                work(params, residuals[p], states[p], [x[p] for x in batch], step)
                for p in range(workers)
            ),
            strict=True,
        )
        params, opt_state = apply(params, opt_state, sent)
        losses.append(float(np.mean(jax.device_get(loss))))
        counts.append(int(passed[0]) / k)
        visit(step, accs[0], gradients[0])
        if visit_all is not None:
            visit_all(step, coos)
    return Curve(untrained, task.validate(params), losses, counts)


def schedule(peak: float, steps: int) -> optax.Schedule:
    """A warmup over a twentieth of the steps, then a cosine down to a hundredth of the peak."""
    warmup = max(1, steps // 20)
    return optax.warmup_cosine_decay_schedule(peak / 20, peak, warmup, steps, peak / 100)
