"""Small trainings over simulated workers, cached because several claims use the same ones."""

import contextlib
import functools
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

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
# For SGD without momentum: of three, each three times the next, the one with the lowest loss.
TEXT_SGD_RATE = {"transformer": 1.0, "lstm": 10.0}
DENSITY = 0.01


@functools.cache
def digits() -> Task:
    """A convolutional network on scikit-learn's digits, n = 18,154; 450 test images."""
    data = read_images(None)
    return image_task(data, convolutional(data.train_images.shape[1:], data.classes))


@functools.cache
def characters(model: str) -> Task:
    """A "transformer" of two blocks, or an "lstm", on Python's help topics."""
    more = {"width": CELLS, "network": lstm} if model == "lstm" else {}
    return text_task(read_text(None), **more)


@functools.cache
def regression() -> Task:
    """Linear regression without noise: any error that remains comes from the training."""
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


# Digits with noise as large as the pixels, as in examples/train_digits.py. A model memorizes clean
# ones within some steps, and at 98 % of 450 held-out images there is nothing left to compare.
NOISE, COPIES, HELD_OUT = 1.0, 8, 450
# The learning rate for clean digits is too large: some seeds of sparse SGD diverged.
NOISY_RATE = 0.02


@functools.lru_cache(maxsize=4)
def noisy_digits(seed: int) -> Task:
    """The same task with noise that is new at every step.

    A held-out image counts by the share of its copies that are classified right. A seed draws
    everything again, also the held-out images, so the deviation of the seeds is the whole error.
    """
    found = read_images(None)
    images = np.concatenate([found.train_images, found.test_images])
    labels = np.concatenate([found.train_labels, found.test_labels])
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    inside, copies = order[HELD_OUT:], np.concatenate([order[:HELD_OUT]] * COPIES)
    data = found._replace(
        train_images=images[inside],
        train_labels=labels[inside],
        test_images=_noisy(images[copies], random),
        test_labels=labels[copies],
    )

    def batch_of(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # All exchanges see the same noise at the same step.
        random = np.random.default_rng((seed, zlib.crc32(chosen.tobytes())))
        return _noisy(data.train_images[chosen], random), data.train_labels[chosen]

    network = convolutional(images.shape[1:], found.classes)
    return image_task(data, network)._replace(batch_of=batch_of)


def _noisy(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return images + np.float32(NOISE) * random.standard_normal(images.shape, np.float32)


def image_variants(steps: int, rate: float) -> dict[str, Variant]:
    """Ways to train on the digits, by name; ``rate`` is for SGD with momentum."""
    # Without momentum the learning rate is multiplied by the sum of the momentum's weights.
    inside, adam = schedule(rate / (1 - MOMENTUM), steps), schedule(0.002, steps)
    behind, alone = optax.sgd(schedule(rate, steps), momentum=MOMENTUM), optax.sgd(inside)
    top_k, adtopk = exact_top_k(DENSITY), select.published.adtopk(density=DENSITY)
    forgets = optax_ext.residual(decay=0.0)
    given: dict[str, Any] = {"density": DENSITY, "axis": AXIS}
    dense = optax_ext.dense(axis=AXIS)

    def by(selector: sc.Selector, **more: Any) -> Variant:
        return Variant(optax_ext.topk_a(**given, selector=selector, **more), alone)

    def algorithm_2(**more: Any) -> Variant:
        return Variant(optax_ext.ok_topk_sgd(inside, **given, **more), optax.identity())

    def quantized(selected: int) -> Variant:
        return Variant(optax_ext.published.quantized_topk(selected / 512, axis=AXIS, bits=4), alone)

    return {
        "dense": Variant(dense, behind),
        "ok_topk_sgd": algorithm_2(selector=top_k),
        "paper": algorithm_2(paper=True),
        "paper, corrected": algorithm_2(paper="corrected"),
        # Room for 4k entries, because the claim is about how many it lets through.
        "gaussian": by(select.published.gaussian_k(density=DENSITY, headroom=3.0)),
        "4 bits": quantized(8),
        "4 bits, 16 of 512": quantized(16),
        "top-k": by(top_k),
        "adtopk": by(adtopk),
        "adtopk-i": by(select.published.adtopk_interleaved(density=DENSITY)),
        "adtopk-t": by(select.published.adtopk_threshold(density=DENSITY, steps=steps)),
        "mstopk": by(select.published.mstopk(density=DENSITY)),
        "top-k, no feedback": by(top_k, residual=forgets),
        "adtopk, no feedback": by(adtopk, residual=forgets),
        "adamw": Variant(dense, optax.adamw(adam)),
        "sparse_adamw": Variant(optax_ext.sparse_adamw(adam, axis=AXIS), optax.identity()),
    }


def text_variants(steps: int) -> dict[str, Variant]:
    """Ways to train on characters, by name."""
    rate = schedule(TEXT_RATE, steps)
    sparse = optax_ext.ok_topk(DENSITY, axis=AXIS, selector=exact_top_k(DENSITY))
    return {
        "dense": Variant(optax_ext.dense(axis=AXIS), optax.adamw(rate)),
        "ok_topk": Variant(sparse, optax.adamw(rate)),
        "sparse_adamw": Variant(optax_ext.sparse_adamw(rate, axis=AXIS), optax.identity()),
    }


@functools.lru_cache(maxsize=256)
def run(task: str, name: str, seed: int, quick: bool) -> Curve:
    """Trains once, on "digits", "noisy digits" or "text".

    The last value is the accuracy on held-out images, or the loss on the last 10 % of the text.
    """
    if task == "text":
        steps, points = TEXT_STEPS[not quick], POINTS[not quick]
        given = {"workers": TEXT_WORKERS, "batch": TEXT_BATCH, "steps": steps, "points": points}
        variant = text_variants(steps)[name]
        return trained(characters("transformer"), variant, seed, name, **given)
    noisy, steps = task == "noisy digits", STEPS[not quick]
    variant = image_variants(steps, NOISY_RATE if noisy else RATE)[name]
    given = {"workers": WORKERS, "batch": BATCH, "steps": steps}
    given["points"] = 1 if noisy else POINTS[not quick]
    return trained(noisy_digits(seed) if noisy else digits(), variant, seed, name, **given)


@functools.lru_cache(maxsize=8)
def on_regression(bits: int | None, seed: int, quick: bool) -> Curve:
    """Trains once; its values are the loss before and after. ``bits`` is None for exact pairs."""
    published, options = optax_ext.published, {"bits": bits} if bits else {}
    sparse = published.quantized_topk if bits else published.topk_dsa
    exchange = sparse(0.05, axis=AXIS, selector=exact_top_k(0.05), **options)
    given = {"workers": 4, "batch": 64, "steps": 200 if quick else 600}
    return trained(regression(), Variant(exchange, optax.sgd(0.01)), seed, f"{bits} bits", **given)


def trained(
    task: Task, variant: Variant, seed: int, label: str, *, points: int = 1, **given: Any
) -> Curve:
    """Trains once, without printing, and evaluates at some points."""
    given["every"] = given["steps"] // points
    with quiet():
        (curve,) = training.train(
            task, lambda *_: variant, seeds=[seed], label=label, **given
        ).values()
    return curve


def followed(model: str, seed: int) -> tuple[Task, int, tuple[int, int], float]:
    """The training in which xi is measured: task, batch, steps, and SGD's largest learning rate."""
    if model == "digits":
        return noisy_digits(seed), BATCH, STEPS, NOISY_RATE / (1 - MOMENTUM)
    return characters(model), 2 * TEXT_BATCH, TEXT_STEPS, TEXT_SGD_RATE[model]


@functools.lru_cache(maxsize=8)
def xi(model: str, density: float, falls: bool, seed: int, quick: bool) -> np.ndarray:
    """The xi of Ok-Topk at each step, with a learning rate that is constant or falls to 1 %."""
    task, batch_size, both, peak = followed(model, seed)
    # One program for all seeds: the network of noisy digits does not depend on the seed.
    steps, (init, scanned) = both[not quick], _measured_xi(density, model)
    rate = schedule(peak, steps) if falls else optax.constant_schedule(peak)
    params = task.init(seed)
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), params)
    chosen = training.order_of(task, steps=steps, batch=batch_size, seed=seed)
    batches = task.batch_of(chosen.reshape(steps, WORKERS, batch_size // WORKERS))
    rates = jnp.asarray([rate(count) for count in range(steps)], jnp.float32)
    return np.asarray(scanned((params, init(copies)), (batches, rates))[1])


@functools.lru_cache(maxsize=4)
def _measured_xi(density: float, model: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The initial state of all workers, and a compiled training for any learning rates."""
    task, *_ = followed(model, 0)
    sparse = optax_ext.ok_topk(density, axis=AXIS, selector=exact_top_k(density))
    tx = optax_ext.measure_xi(sparse, axis=AXIS)
    shared = {"axis": AXIS, "axis_size": WORKERS}
    exchange = sc.simulate(tx.update, in_axes=(0, 0, None), **shared)

    def step(carry: Any, given: Any) -> Any:
        params, state = carry
        batch, rate = given
        gradients = lax.map(lambda one: jax.grad(task.loss)(params, one), batch)
        # As in Algorithm 2, the learning rate is applied before the accumulation.
        gradients = jax.tree.map(lambda x: rate * x, gradients)
        means, state = exchange(gradients, state, params)
        params = jax.tree.map(lambda p, mean: p - mean[0], params, means)
        return (params, state), state.xi[0]

    return sc.simulate(tx.init, **shared), jax.jit(lambda carry, xs: lax.scan(step, carry, xs))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what programs print: the progress of all claims is shown instead."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
