"""Training with several learning rates and seeds in one program, for accelerators.

A run of a small model keeps a GPU busy for a fraction of the time between two launches, and the
launches of a grid of runs are as many as the launches of one. The workers compute together.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._common import options
from ._simulated_training import Curve, Task, Variant, counted, order_of, start_of, step_of


def train_grid(
    task: Task,
    make: Callable[[float, int], Variant],
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    workers: int,
    steps: int,
    every: int,
    batch: int,
    label: str,
) -> dict[tuple[float, int], Curve]:
    """Trains with ``make(rate, steps)`` for each rate and seed; the rest is as for ``train``."""
    keys = [(rate, seed) for rate in rates for seed in seeds]
    of_run = jnp.array([rate for rate, _ in keys]), jnp.array([seeds.index(x) for _, x in keys])

    def start(rate, seed, params):
        return start_of(make(rate, steps), jax.tree.map(lambda x: x[seed], params), workers)

    def step(rate, seed, carry, batches):
        # The batches of a seed are the same for every rate.
        mine = jax.tree.map(lambda x: x[seed], batches)
        return step_of(task, make(rate, steps), workers, _together)(carry, mine)

    starts = jax.vmap(start, in_axes=(0, 0, None))
    grid = jax.vmap(step, in_axes=(0, 0, 0, None))
    first = [task.init(seed) for seed in seeds]
    carry = jax.jit(starts)(*of_run, jax.tree.map(lambda *leaves: jnp.stack(leaves), *first))

    @jax.jit
    def part(carry, batches):
        return lax.scan(lambda *given: grid(*of_run, *given), carry, batches)

    size = sum(leaf.size for leaf in jax.tree.leaves(first[0]))
    orders = [order_of(task, steps=steps, batch=batch, seed=seed) for seed in seeds]
    chosen = np.stack(orders, axis=1).reshape(steps, len(seeds), workers, batch // workers)
    begun = dict(zip(seeds, map(task.evaluate, first), strict=True))
    curves = [Curve([0], [begun[seed]], [], None, None) for _, seed in keys]
    sent = []
    for begin in range(0, steps, every):
        batches = task.batch_of(chosen[begin : begin + every])
        carry, (losses, counts) = part(carry, batches)
        sent.append(np.array(counts, np.float64))
        for run, curve in enumerate(curves):
            curve.steps.append(min(begin + every, steps))
            curve.values.append(task.evaluate(jax.tree.map(itemgetter(run), carry[0])))
            curve.losses.append(float(losses[:, run].mean()))
        lowest = min(curve.values[-1] for curve in curves)
        step_now = curves[0].steps[-1]
        options.say(f"{task.name}, {label}, P = {workers}, step {step_now}: best {lowest:.4f}")
    if sent[0].size:
        found = np.concatenate(sent, axis=1)
        curves = [counted(curve, found[..., run], size) for run, curve in enumerate(curves)]
    return dict(zip(keys, curves, strict=True))


def _together(function, given):
    return jax.vmap(function)(given)
