"""Small trainings over simulated workers, kept, as several claims compare with the same ones."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optax_ext
import sparse_collectives as sc
from sparse_collectives import select

from ..training import _simulated_training as training
from ..training._data import read_images, read_text
from ..training._recorded_training import MOMENTUM, schedule
from ..training._simulated_training import AXIS, Curve, Task, Variant, exact_top_k
from ..training._small_models import convolutional
from ..training._small_tasks import image_task, text_task
from ..training._text_models import CELLS, lstm

WORKERS, BATCH, RATE = 8, 64, 0.05
STEPS = (120, 400)
TEXT_WORKERS, TEXT_BATCH, TEXT_RATE = 4, 16, 0.01
TEXT_STEPS = (60, 400)
# Measurements along a training, evenly spread.
POINTS = (5, 20)
# Of SGD without momentum: the one with the lowest loss of three, each a third of the next.
TEXT_SGD_RATE = {"transformer": 1.0, "lstm": 10.0}
DENSITY = 0.01


@functools.cache
def digits() -> Task:
    """A convolutional network on scikit-learn's digits, n = 18,154; 450 test images."""
    data = read_images(None)
    return image_task(data, convolutional(data.train_images.shape[1:], data.classes))


@functools.cache
def characters() -> Task:
    """A transformer of two blocks on Python's help topics."""
    return text_task(read_text(None))


@functools.cache
def lstm_characters() -> Task:
    """An LSTM on the same characters."""
    return text_task(read_text(None), width=CELLS, network=lstm)


@functools.cache
def regression() -> Task:
    """Linear, without noise: what a training cannot fit is its own doing."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((4096, 1024)).astype(np.float32)
    targets = inputs @ rng.standard_normal(1024).astype(np.float32)

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch[0] @ params["weights"] - batch[1]) ** 2)

    return Task(
        "regression",
        lambda seed: {"weights": jnp.zeros(1024)},
        loss,
        lambda chosen: (inputs[chosen], targets[chosen]),
        len(targets),
        lambda params: float(loss(params, (inputs, targets))),
        once=False,
    )


def image_variants(steps: int, rate: float = RATE) -> dict[str, Variant]:
    """Ways to train on the digits, by name; ``rate`` is that of SGD with momentum."""
    behind = optax.sgd(schedule(rate, steps), momentum=MOMENTUM)
    # Without momentum the same distance takes a rate larger by what momentum sums up.
    alone = optax.sgd(schedule(rate / (1 - MOMENTUM), steps))
    inside = schedule(rate / (1 - MOMENTUM), steps)
    top_k = exact_top_k(DENSITY)
    given: dict[str, Any] = {"density": DENSITY, "axis": AXIS}

    def by(selector: sc.Selector, *, feedback: bool = True) -> Variant:
        residual = None if feedback else optax_ext.residual(decay=0.0)
        return Variant(optax_ext.topk_a(**given, selector=selector, residual=residual), alone)

    by_threshold = select.adtopk_threshold(density=DENSITY, steps=steps)
    return {
        "dense": Variant(optax_ext.dense(axis=AXIS), behind),
        "ok_topk_sgd": Variant(
            optax_ext.ok_topk_sgd(inside, **given, selector=top_k), optax.identity()
        ),
        "paper": Variant(optax_ext.ok_topk_sgd(inside, **given, paper=True), optax.identity()),
        "paper, corrected": Variant(
            optax_ext.ok_topk_sgd(inside, **given, paper="corrected"), optax.identity()
        ),
        # Room for four times k: what it lets through is what is to be seen.
        "gaussian": by(select.gaussian_k(density=DENSITY, headroom=3.0)),
        "4 bits": Variant(optax_ext.quantized_topk(8 / 512, axis=AXIS, bits=4), alone),
        "4 bits, 16 of 512": Variant(optax_ext.quantized_topk(16 / 512, axis=AXIS, bits=4), alone),
        "top-k": by(top_k),
        "adtopk": by(select.adtopk(density=DENSITY)),
        "adtopk-i": by(select.adtopk_interleaved(density=DENSITY)),
        "adtopk-t": by(by_threshold),
        "mstopk": by(select.mstopk(density=DENSITY)),
        "top-k, no feedback": by(top_k, feedback=False),
        "adtopk, no feedback": by(select.adtopk(density=DENSITY), feedback=False),
        "adamw": Variant(optax_ext.dense(axis=AXIS), optax.adamw(schedule(0.002, steps))),
        "sparse_adamw": Variant(
            optax_ext.sparse_adamw(schedule(0.002, steps), axis=AXIS), optax.identity()
        ),
    }


def text_variants(steps: int) -> dict[str, Variant]:
    """Ways to train on characters, by name."""
    rate = schedule(TEXT_RATE, steps)
    adamw = optax.adamw(rate)
    sparse = optax_ext.ok_topk(DENSITY, axis=AXIS, selector=exact_top_k(DENSITY))
    return {
        "dense": Variant(optax_ext.dense(axis=AXIS), adamw),
        "ok_topk": Variant(sparse, adamw),
        "sparse_adamw": Variant(optax_ext.sparse_adamw(rate, axis=AXIS), optax.identity()),
    }


@functools.lru_cache(maxsize=64)
def on_digits(name: str, seed: int, quick: bool) -> Curve:
    """Trains once; the last of its values is the accuracy on the test images."""
    steps, points = STEPS[0 if quick else 1], POINTS[0 if quick else 1]
    variant = image_variants(steps)[name]
    return trained(digits(), variant, WORKERS, steps, BATCH, seed, name, points)


@functools.lru_cache(maxsize=16)
def on_text(name: str, seed: int, quick: bool) -> Curve:
    """Trains once; the last of its values is the loss on the last tenth of the text."""
    steps, points = TEXT_STEPS[0 if quick else 1], POINTS[0 if quick else 1]
    variant = text_variants(steps)[name]
    return trained(characters(), variant, TEXT_WORKERS, steps, TEXT_BATCH, seed, name, points)


@functools.lru_cache(maxsize=8)
def on_regression(bits: int | None, seed: int, quick: bool) -> Curve:
    """Trains once; its values are the loss before and after. None: exact pairs."""
    steps, given = 200 if quick else 600, {"axis": AXIS, "selector": exact_top_k(0.05)}
    exchange = (
        optax_ext.topk_dsa(0.05, **given)
        if bits is None
        else optax_ext.quantized_topk(0.05, bits=bits, **given)
    )
    variant = Variant(exchange, optax.sgd(0.01))
    return trained(regression(), variant, 4, steps, 64, seed, f"{bits} bits")


class Followed(NamedTuple):
    """A training in which xi is measured.

    Attributes:
      task: what is trained.
      workers: how many.
      batch: examples of all workers in a step.
      rate: its peak, of SGD without momentum.
    """

    task: Task
    workers: int
    batch: int
    rate: float


def followed(model: str) -> Followed:
    """That of a model by its name."""
    if model == "digits":
        return Followed(digits(), WORKERS, BATCH, RATE / (1 - MOMENTUM))
    task = characters() if model == "transformer" else lstm_characters()
    return Followed(task, WORKERS, 2 * TEXT_BATCH, TEXT_SGD_RATE[model])


def xi(
    density: float, seed: int, quick: bool, model: str = "digits", falls: bool = False
) -> np.ndarray:
    """The xi of Ok-Topk at each step of a training, which is made once.

    Args:
      density: k / n.
      seed: of parameters and batches.
      quick: fewer steps.
      model: digits, lstm or transformer.
      falls: the rate falls to a hundredth, and is not the same at all steps.
    """
    return _followed_xi(density, seed, quick, model, falls)


@functools.lru_cache(maxsize=8)
def _followed_xi(density: float, seed: int, quick: bool, model: str, falls: bool) -> np.ndarray:
    task, workers, batch_size, peak = followed(model)
    steps = (STEPS if model == "digits" else TEXT_STEPS)[0 if quick else 1]
    init, scanned = _measured_xi(density, model)
    rate = schedule(peak, steps) if falls else optax.constant_schedule(peak)
    params = task.init(seed)
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), params)
    chosen = training.order_of(task, steps=steps, batch=batch_size, seed=seed)
    batches = task.batch_of(chosen.reshape(steps, workers, batch_size // workers))
    rates = jnp.asarray([rate(count) for count in range(steps)], jnp.float32)
    return np.asarray(scanned((params, init(copies)), (batches, rates))[1])


@functools.lru_cache(maxsize=4)
def _measured_xi(density: float, model: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The initial state of all workers, and a compiled training; with any rate it is the same."""
    task, workers, _, _ = followed(model)
    sparse = optax_ext.ok_topk(density, axis=AXIS, selector=exact_top_k(density))
    tx = optax_ext.measure_xi(sparse, axis=AXIS)
    shared = {"axis": AXIS, "axis_size": workers}
    exchange = sc.simulate(tx.update, in_axes=(0, 0, None), **shared)

    def step(carry: Any, given: Any) -> Any:
        params, state = carry
        batch, rate = given
        gradients = lax.map(lambda one: jax.grad(task.loss)(params, one), batch)
        # As in Algorithm 2, the rate is applied before the accumulation.
        gradients = jax.tree.map(lambda x: rate * x, gradients)
        means, state = exchange(gradients, state, params)
        params = jax.tree.map(lambda p, mean: p - mean[0], params, means)
        return (params, state), state.xi[0]

    return sc.simulate(tx.init, **shared), jax.jit(lambda carry, xs: lax.scan(step, carry, xs))


def trained(
    task: Task,
    variant: Variant,
    workers: int,
    steps: int,
    batch: int,
    seed: int,
    label: str,
    points: int = 1,
) -> Curve:
    given: dict[str, Any] = {"workers": workers, "steps": steps, "batch": batch}
    given["every"] = steps // points
    with quiet():
        return training.train(task, variant, **given, seeds=[seed], label=label)[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what programs print: the progress of all claims is shown instead."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
