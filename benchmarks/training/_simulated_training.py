"""Training over simulated workers, many steps in one program.

The parameters and the optimizer after the exchange are the same on every worker, so there is one of
each. The gradients and the state of the exchange differ, and have a leading axis of P. The workers
take parts of one batch, in the same order whatever P is, so that runs with different numbers of
workers and different exchanges see the same examples at the same step.
"""

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optax_ext
import sparse_collectives as sc

from .._common import options
from .._common.options import InputError

AXIS = "workers"


class Task(NamedTuple):
    """A learning task.

    ``batch_of(chosen)`` returns the examples ``chosen i32[...]`` out of ``count`` as NumPy arrays,
    and ``loss(params, batch)`` their mean loss. ``evaluate`` uses held-out data, and ``validate``
    returns the loss and more on them, by name; without it that is ``evaluate`` alone. With ``once``
    every example comes once before any comes again; otherwise each is drawn from all.
    """

    name: str
    init: Callable[[int], Any]
    loss: Callable[[Any, Any], jax.Array]
    batch_of: Callable[[np.ndarray], Any]
    count: int
    evaluate: Callable[[Any], float]
    once: bool
    validate: Callable[[Any], dict[str, float]] | None = None


class Variant(NamedTuple):
    """A way to train."""

    # Averages the gradients over AXIS on each worker, or is a complete optimizer.
    exchange: optax.GradientTransformation
    # Makes updates of the mean; ``optax.identity()`` after a complete optimizer.
    optimizer: optax.GradientTransformation
    # The parameters to evaluate, of those in training and the states of exchange and optimizer.
    evaluated: Callable[[Any, Any, Any], Any] = lambda params, *states: params


class Curve(NamedTuple):
    """The results of a run: values and mean training losses at some steps.

    Without an allreduce the rest is None: the mean of the words that each worker received in a
    step, the mean share of entries in the update, / n, and the entries that a worker selected and
    that were delivered at each step, ``f64[2, steps]``.
    """

    steps: list[int]
    values: list[float]
    losses: list[float]
    words: float | None
    delivered: float | None
    counts: np.ndarray | None = None


def exact_top_k(density: float) -> sc.Selector:
    """The selection of ``select.topk`` by ``lax.top_k``: faster for many workers and a small n."""

    def select(acc: jax.Array, state: Any) -> tuple[sc.PaddedCOO, Any, sc.SelectInfo]:
        size = acc.shape[0]
        found = lax.top_k(jnp.abs(acc), max(1, round(density * size)))
        # With a slice of its result XLA would make a full sort of it, some sixty times slower.
        magnitudes, indices = lax.optimization_barrier(found)
        indices = jnp.sort(jnp.where(magnitudes > 0, indices, size))
        values = acc.at[indices].get(mode="fill", fill_value=0.0)
        selected = jnp.sum(indices < size, dtype=jnp.int32)
        info = sc.SelectInfo(selected, jnp.zeros((), jnp.int32), magnitudes[-1])
        return sc.PaddedCOO(values, indices, size), state, info

    return sc.Selector(lambda layout: (), select)


def order_of(task: Task, *, steps: int, batch: int, seed: int) -> np.ndarray:
    """The examples of each step, i32[steps, batch]; an InputError if a batch has too many."""
    if batch > task.count:
        raise InputError(f"a step takes {batch} examples, of {task.count}")
    random = np.random.default_rng(1000 + seed)
    if not task.once:
        return random.integers(0, task.count, (steps, batch)).astype(np.int32)
    each = task.count // batch
    epochs = [
        random.permutation(task.count)[: each * batch].reshape(each, batch)
        for _ in range(-(-steps // each))
    ]
    return np.concatenate(epochs)[:steps].astype(np.int32)


Each = Callable[[Callable[[Any], Any], Any], Any]


def step_of(
    task: Task, variant: Variant, workers: int, each: Each
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A step of all workers, for ``lax.scan``; ``each(f, xs)`` applies f to the part of each."""
    shared = {"axis": AXIS, "axis_size": workers}
    exchange = sc.simulate(variant.exchange.update, in_axes=(0, 0, None), **shared)
    ahead = sc.simulate(optax_ext.ahead, in_axes=(None, 0), **shared)

    def step(carry, batches):
        params, state, optimizer_state = carry
        losses, gradients = each(
            lambda where: jax.value_and_grad(task.loss)(*where), (ahead(params, state), batches)
        )
        means, state = exchange(gradients, state, params)
        # Every worker has the same mean, bit for bit.
        mean = jax.tree.map(lambda x: x[0], means)
        updates, optimizer_state = variant.optimizer.update(mean, optimizer_state, params)
        info, sent = optax_ext.get_info(state), ()
        if info is not None:
            sent = (info.words[0], info.selected.mean(), info.delivered[0] * 1.0)
        carry = optax.apply_updates(params, updates), state, optimizer_state
        return carry, (losses.mean(), sent)

    return step


def start_of(variant: Variant, params: Any, workers: int) -> tuple[Any, Any, Any]:
    """What steps carry: the parameters, and the states of the exchange and the optimizer."""
    init = sc.simulate(variant.exchange.init, axis=AXIS, axis_size=workers)
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), params)
    return params, init(copies), variant.optimizer.init(params)


def train(
    task: Task,
    make: Callable[[float, int], Variant],
    *,
    rates: Sequence[float] = (0.0,),
    seeds: Sequence[int],
    workers: int,
    steps: int,
    every: int,
    batch: int,
    label: str,
    together: bool = False,
) -> dict[tuple[float, int], Curve]:
    """Trains with ``make(rate, steps)`` for each rate and seed.

    It measures after each ``every`` steps, and at the end. With ``together`` all runs are one
    program, for accelerators: a run of a small model keeps a GPU busy for a fraction of the time
    between two launches, and a grid of runs has as many launches as one. ``batch`` is of all
    workers; an InputError if it can't be divided evenly among them.
    """
    if batch % workers:
        raise InputError(f"a batch of {batch} can't be dealt out to {workers} workers")
    first = [task.init(seed) for seed in seeds]
    orders = [order_of(task, steps=steps, batch=batch, seed=seed) for seed in seeds]
    chosen = np.stack(orders, axis=1).reshape(steps, len(seeds), workers, batch // workers)
    said = f"{task.name}, {label}, P = {workers}"
    if together:
        keys = [(rate, place) for rate in rates for place in range(len(seeds))]
        of_run = tuple(jnp.array(x) for x in zip(*keys, strict=True))

        def start(rate, place, params):
            mine = jax.tree.map(lambda x: x[place], params)
            return start_of(make(rate, steps), mine, workers)

        def step(rate, place, carry, batches):
            # The batches of a seed are the same for every rate.
            mine = jax.tree.map(lambda x: x[place], batches)
            return step_of(task, make(rate, steps), workers, _at_once)(carry, mine)

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *first)
        carry = jax.jit(jax.vmap(start, in_axes=(0, 0, None)))(*of_run, stacked)
        grid = jax.vmap(step, in_axes=(0, 0, 0, None))
        part = _part(lambda carry, batches: grid(*of_run, carry, batches))

        evaluated = make(rates[0], steps).evaluated

        def runs(carry):
            return [evaluated(*jax.tree.map(itemgetter(i), carry)) for i in range(len(keys))]

        curves = _curves(task, part, carry, chosen, every, said, runs)
        return {(rate, seeds[at]): x for (rate, at), x in zip(keys, curves, strict=True)}
    found = {}
    for rate in rates:
        variant = make(rate, steps)
        # One worker after the other: small products of matrices stay in the cache.
        part = _part(step_of(task, variant, workers, lax.map))
        runs = functools.partial(_only, variant)
        for place, seed in enumerate(seeds):
            carry, mine = start_of(variant, first[place], workers), chosen[:, place]
            label = f"{said}, seed {seed}"
            found[rate, seed], *_ = _curves(task, part, carry, mine, every, label, runs)
    return found


def _only(variant: Variant, carry):
    return [variant.evaluated(*carry)]


def _at_once(function, given):
    return jax.vmap(function)(given)


def _part(step):
    """So many steps, compiled; a shorter part at the end is compiled separately."""
    return jax.jit(lambda carry, batches: lax.scan(step, carry, batches))


def _curves(task: Task, part, carry, chosen, every: int, label: str, runs) -> list[Curve]:
    """Takes all steps; ``runs`` makes a list of the parameters to evaluate."""
    steps, sent = len(chosen), []
    begun = runs(carry)
    size = sum(leaf.size for leaf in jax.tree.leaves(begun[0]))
    curves = [Curve([0], [task.evaluate(params)], [], None, None) for params in begun]
    for begin in range(0, steps, every):
        carry, (losses, counts) = part(carry, task.batch_of(chosen[begin : begin + every]))
        sent.append(np.array(counts, np.float64))
        means = np.atleast_1d(losses.mean(0))
        for curve, params, loss in zip(curves, runs(carry), means, strict=True):
            curve.steps.append(min(begin + every, steps))
            curve.values.append(task.evaluate(params))
            curve.losses.append(float(loss))
        best = min(curves, key=lambda curve: curve.values[-1])
        options.say(
            f"{label}, step {best.steps[-1]}: "
            f"{best.values[-1]:.4f} (training loss {best.losses[-1]:.4f})"
        )
    if not sent[0].size:
        return curves
    each = np.concatenate(sent, axis=1).reshape(3, steps, -1)
    return [counted(curve, each[..., i], size) for i, curve in enumerate(curves)]


def counted(curve: Curve, sent: np.ndarray, size: int) -> Curve:
    """The curve with its means and counts of ``sent f64[3, steps]``."""
    words, selected, delivered = sent
    counts, share = np.stack([selected, delivered]), float(delivered.mean()) / size
    return curve._replace(words=float(words.mean()), delivered=share, counts=counts)
