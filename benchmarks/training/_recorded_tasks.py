"""What the recorded trainings learn: a language model on characters, a small VGG on images.

The language model has an embedding, two LSTM layers and an output layer.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from examples._data import Dataset, batches

from .._common.options import InputError, add_outputs, at_least_one, parser_of, share
from ._data import read_images, read_text
from ._recorded_training import Task

EMBEDDING, HIDDEN, WINDOW = 64, 256, 32
CHANNELS, DENSE = (32, 64, 128, 128), 256
# A pooling by two after these of the convolutions.
POOLED = (0, 1, 3)
# Learning rates per worker; see `_recorded_training`.
TEXT_RATE, IMAGE_RATE = 0.5, 0.01


class Run(NamedTuple):
    """One training run to record.

    Attributes:
      name: images or text.
      make_task: ``make_task(workers)``, a fresh task with data for so many workers.
      density: k / n.
    """

    name: str
    make_task: Callable[[int], Task]
    density: float


def recording_parser(
    description: str | None, *, steps: int, batch: int = 4
) -> argparse.ArgumentParser:
    """A parser with the options of every program that records trainings."""
    parser = parser_of(description)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="plain text, such as a novel")
    add("--images", type=Path, metavar="DIR", help="IDX files, such as MNIST")
    add("--density-text", type=share, default=0.02)
    add("--density-images", type=share, default=0.01)
    add("--steps", type=at_least_one, default=steps, help="of each run")
    add("--batch", type=at_least_one, default=batch, help="of each worker")
    add("--seed", type=int, default=0)
    add_outputs(parser, plot=True)
    return parser


def recorded_runs(args: argparse.Namespace) -> tuple[Run, Run]:
    """The image run and the text run.

    Raises:
      InputError: the data cannot be read.
    """
    text, images = read_text(args.text), read_images(args.images)
    options: dict[str, Any] = {"batch": args.batch, "seed": args.seed}

    def of_images(workers: int) -> Task:
        return image_task(images, workers=workers, rate=IMAGE_RATE, **options)

    def of_text(workers: int) -> Task:
        return text_task(text, workers=workers, rate=TEXT_RATE, **options)

    return Run("images", of_images, args.density_images), Run("text", of_text, args.density_text)


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
