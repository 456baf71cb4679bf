"""Two training runs with top-k error feedback, whose accumulators are there to look at.

A character language model (embedding, two LSTM layers, output layer) and a small VGG-like
convolutional network. Each worker adds its gradient to its residual, sends the exact top-k of the
sum and keeps the rest; the mean of what was sent goes to the optimizer. That is error feedback by
the book: it depends on no allreduce and on none of the selectors that are measured.

The learning rate is applied in one of two places. `before` accumulation, as in algorithm 2 of
Ok-Topk: when the rate has fallen, what is new is small beside what the residual holds from before.
Or `behind` it, in SGD with momentum, which leaves the accumulators in the units of the gradient.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measures import Leaf
from jax import lax
from jax.flatten_util import ravel_pytree

from sparse_collectives import PaddedCOO, Selector, select

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from _data import Dataset, InputError, batches  # noqa: E402  # pyright: ignore[reportMissingImports]

EMBEDDING, HIDDEN, WINDOW = 64, 256, 32
CHANNELS, DENSE = (32, 64, 128, 128), 256
# A pooling by two after these of the convolutions.
POOLED = (0, 1, 3)
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


def text_task(text: str, *, workers: int, batch: int, rate: float, seed: int) -> Task:
    """A character language model; the last twentieth of the text is for validation.

    Raises:
      InputError: the text is too short.
    """
    alphabet, code = np.unique(np.array(list(text)), return_inverse=True)
    cut = len(code) * 19 // 20
    if len(code) - cut < 10 * WINDOW:
        raise InputError(f"the text has {len(code)} characters, at least {200 * WINDOW} are needed")
    random = np.random.default_rng(seed)

    def windows(part, starts):
        return part[starts[..., None] + np.arange(WINDOW + 1)].astype(np.int32)

    def stream():
        while True:
            characters = windows(code[:cut], random.integers(0, cut - WINDOW, (workers, batch)))
            yield characters[..., :-1], characters[..., 1:]

    held_out = windows(code[cut:], np.linspace(0, len(code) - cut - WINDOW - 1, 256, dtype=int))
    vocabulary = len(alphabet)

    def loss(params, batch):
        return _loss_and_accuracy(_language_model(params, batch[0]), batch[1])["loss"]

    @jax.jit
    def measure(params):
        logits = _language_model(params, held_out[:, :-1])
        return _loss_and_accuracy(logits, jnp.asarray(held_out[:, 1:]))

    def matrix(inputs, outputs):
        scale = inputs**-0.5
        return jnp.asarray(random.uniform(-scale, scale, (inputs, outputs)), jnp.float32)

    def layer(inputs):
        # The bias of the forget gate starts at 1, as is usual.
        bias = jnp.zeros(4 * HIDDEN).at[HIDDEN : 2 * HIDDEN].set(1.0)
        kernels = {"input": matrix(inputs, 4 * HIDDEN), "recurrent": matrix(HIDDEN, 4 * HIDDEN)}
        return {**kernels, "bias": bias}

    params = {
        "embedding": jnp.asarray(random.normal(0, 1, (vocabulary, EMBEDDING)), jnp.float32),
        "lstm_0": layer(EMBEDDING),
        "lstm_1": layer(HIDDEN),
        "output": {"kernel": matrix(HIDDEN, vocabulary), "bias": jnp.zeros(vocabulary)},
    }

    return Task(params, loss, stream(), lambda p: _floats(measure(p)), rate, clip=1.0)


def image_task(data: Dataset, *, workers: int, batch: int, rate: float, seed: int) -> Task:
    """A VGG-like network on images of one channel."""
    random = np.random.default_rng(seed)
    test_images, test_labels = data.test_images[:2000], data.test_labels[:2000]

    def stream():
        size = workers * batch
        if size > len(data.train_images):
            raise InputError(f"a step takes {size} images, of {len(data.train_images)}")
        for images, labels in batches(data.train_images, data.train_labels, size=size, seed=seed):
            yield images.reshape(workers, batch, *images.shape[1:]), labels.reshape(workers, batch)

    def loss(params, batch):
        return _loss_and_accuracy(_convolutional(params, batch[0]), batch[1])["loss"]

    @jax.jit
    def measure(params):
        return _loss_and_accuracy(_convolutional(params, test_images), jnp.asarray(test_labels))

    def layer(*shape):
        scale = (2 / np.prod(shape[:-1])) ** 0.5
        kernel = jnp.asarray(random.normal(0, scale, shape), jnp.float32)
        return {"kernel": kernel, "bias": jnp.zeros(shape[-1])}

    params, inputs = {}, 1
    height, width = data.train_images.shape[1:]
    for i, outputs in enumerate(CHANNELS):
        params[f"conv_{i}"] = layer(3, 3, inputs, outputs)
        inputs = outputs
        if i in POOLED:
            height, width = height // 2, width // 2
    params["dense"] = layer(height * width * inputs, DENSE)
    params["output"] = layer(DENSE, data.classes)

    return Task(params, loss, stream(), lambda p: _floats(measure(p)), rate, clip=math.inf)


def _language_model(params: Any, tokens: Any) -> jax.Array:
    """Maps i32[batch, time] to logits, f32[batch, time, vocabulary]."""
    x = params["embedding"][tokens].swapaxes(0, 1)
    for name in ("lstm_0", "lstm_1"):
        x = _lstm(params[name], x)
    return x.swapaxes(0, 1) @ params["output"]["kernel"] + params["output"]["bias"]


def _lstm(layer: Any, x: jax.Array) -> jax.Array:
    """Maps f32[time, batch, inputs] to f32[time, batch, HIDDEN]."""

    def step(carry, gates):
        hidden, cell = carry
        gates = gates + hidden @ layer["recurrent"]
        enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zero = jnp.zeros((x.shape[1], HIDDEN))
    return lax.scan(step, (zero, zero), x @ layer["input"] + layer["bias"])[1]


def _convolutional(params: Any, images: jax.Array) -> jax.Array:
    """Maps f32[batch, height, width] to logits, f32[batch, classes]."""
    x = images[..., None]
    for i in range(len(CHANNELS)):
        layer = params[f"conv_{i}"]
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x + layer["bias"])
        if i in POOLED:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["dense"]["kernel"] + params["dense"]["bias"])
    return x @ params["output"]["kernel"] + params["output"]["bias"]


def _loss_and_accuracy(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels)}


def _floats(tree: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(value) for name, value in tree.items()}
