"""Training with top-k error feedback, with access to its accumulators.

Each worker adds its gradient to its residual, sends the exact top-k of the sum and keeps the rest;
the mean of the sent entries goes to the optimizer. That is textbook error feedback: it depends on
no allreduce and on none of the measured selectors. The learning rate is applied `before` the
accumulation, as in algorithm 2 of Ok-Topk, or `behind`, that is after it, in SGD with momentum,
which leaves the accumulators in the units of the gradient.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from sparse_collectives import PaddedCOO, select

from .._common import options
from . import _simulated_training as simulated
from ._measures import Leaf

ORDERS = ("before", "behind")
MOMENTUM = 0.9
# ``visit(step, accumulator, gradient, selections)``: the vectors are worker 0's, ``f32[n]``.
Visit = Callable[[int, jax.Array, jax.Array, Sequence[PaddedCOO]], None]


class Run(NamedTuple):
    """The training to record: images or text, with a density k / n.

    ``hard`` is the layer that is scaled in the harder case: some percent of the parameters, more
    than k. The batch is for each worker, ``rate`` the peak of SGD with momentum, and ``clip`` the
    largest norm of a worker's gradient.
    """

    name: str
    learns: simulated.Task
    density: float
    hard: str
    batch: int
    seed: int
    rate: float = 0.01
    clip: float = math.inf


class Curve(NamedTuple):
    """Loss, and accuracy of images, on held-out data before and after; and values at each step.

    These are the training loss, and the entries of worker 0 that passed the threshold, / k.
    """

    before: dict[str, float]
    after: dict[str, float]
    losses: list[float]
    passed: list[float]


class Recorder:
    """One training of a run with so many workers.

    ``factor`` multiplies the gradient of the layer ``run.hard`` before the accumulation. The sent
    entries are divided by it before the optimizer, so it affects only which entries are sent.
    """

    def __init__(self, run: Run, workers: int, factor: float | None = None):
        self.run, self.workers = run, workers
        self.task = SimpleNamespace(params=run.learns.init(run.seed))
        self.layout = layout_of(self.task.params)
        self.size = sum(leaf.size for leaf in self.layout)
        self.k = max(1, round(run.density * self.size))
        self._units = jnp.ones(self.size)
        if factor is not None:
            scaled = next(leaf for leaf in self.layout if leaf.name == run.hard)
            layer = slice(scaled.start, scaled.start + scaled.size)
            self._units = self._units.at[layer].set(factor)

    def train(
        self, steps: int, *, order="before", selector: Any = None, visit: Visit = lambda *_: None
    ) -> Curve:
        """Trains, and calls ``visit`` at every step; vectors are as in :func:`layout_of`.

        ``order`` is one of ORDERS; the selector drives the training, the exact top-k by default.
        """
        run, learns, before = self.run, self.run.learns, order == "before"
        # Without momentum the learning rate is multiplied by the sum of the momentum's weights.
        rate = schedule(run.rate / (1 - MOMENTUM) if before else run.rate, steps)
        tx = optax.sgd(1.0) if before else optax.sgd(rate, momentum=MOMENTUM)
        flat, unravel = ravel_pytree(self.task.params)
        selector = select.topk(density=run.density) if selector is None else selector
        validate = learns.validate or (lambda params: {"loss": learns.evaluate(params)})

        @jax.jit
        def work(params, residual, state, batch, step):
            loss, gradient = jax.value_and_grad(learns.loss)(params, batch)
            gradient = ravel_pytree(gradient)[0]
            gradient *= jnp.minimum(1, run.clip / jnp.linalg.norm(gradient))
            gradient = gradient * rate(step) if before else gradient
            gradient = gradient * self._units
            acc = residual + gradient
            coo, state, info = selector.select(acc, state)
            sent = coo.to_dense()
            passed = info.selected + info.overflow
            return loss, gradient, acc, acc - sent, state, coo, sent / self._units, passed

        @jax.jit
        def apply(params, opt_state, sent):
            updates, opt_state = tx.update(unravel(jnp.stack(sent).mean(0)), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = self.task.params, tx.init(self.task.params)
        residuals = [jnp.zeros_like(flat)] * self.workers
        states = [selector.init(flat.size)] * self.workers
        batch = self.workers * run.batch
        order_of_examples = simulated.order_of(learns, steps=steps, batch=batch, seed=run.seed)
        curve = Curve(validate(params), {}, [], [])
        for step, chosen in enumerate(order_of_examples):
            batches = map(learns.batch_of, np.split(chosen, self.workers))
            given = zip(residuals, states, batches, strict=True)
            found = [work(params, *each, step) for each in given]
            loss, gradients, accs, residuals, states, coos, sent, passed = zip(*found, strict=True)
            params, opt_state = apply(params, opt_state, sent)
            curve.losses.append(float(np.mean(jax.device_get(loss))))
            curve.passed.append(int(passed[0]) / self.k)
            visit(step, accs[0], gradients[0], coos)
            text = f"{run.name}, P = {self.workers}: step {step + 1} of {steps}"
            options.progress(text, last=step + 1 == steps)
        return curve._replace(after=validate(params))

    def description(self, curve: Curve) -> dict[str, Any]:
        """The entries of a report on each training."""
        return {
            "run": self.run.name,
            "workers": self.workers,
            "size": self.size,
            "density": self.run.density,
            "k": self.k,
            "steps": len(curve.losses),
            "validation_before": curve.before,
            "validation_after": curve.after,
        }


def layout_of(params: Any) -> list[Leaf]:
    """The leaves in the flat buffer; rows are output channels, or words of an embedding."""
    leaves, start = [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves.append(Leaf(name, leaf.shape, start, 0 if "embedding" in name else -1))
        start += leaf.size
    return leaves


def schedule(peak: float, steps: int) -> optax.Schedule:
    """A warmup over 5 % of the steps, then a cosine down to 1 % of the peak."""
    warmup = max(1, steps // 20)
    share = optax.warmup_cosine_decay_schedule(0.05, 1.0, warmup, steps, 0.01)
    return lambda count: peak * share(count)
