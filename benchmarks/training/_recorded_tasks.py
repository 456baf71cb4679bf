"""What the recorded trainings learn: a language model on characters, a small VGG on images.

The language model has an embedding, two LSTM layers and an output layer.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from examples._data import Dataset, batches

from .._common.options import InputError, add_outputs, at_least_one, parser_of, share
from ._data import read_images, read_text
from ._recorded_training import Run, Task
from ._small_models import affine, forgetful, layer, normal, recurrence

EMBEDDING, HIDDEN, WINDOW = 64, 256, 32
CHANNELS, DENSE = (32, 64, 128, 128), 256
# A pooling by two after these of the convolutions.
POOLED = (0, 1, 3)
# Learning rates per worker; see `_recorded_training`.
TEXT_RATE, IMAGE_RATE = 0.5, 0.01


def recording_parser(
    description: str | None, *, steps: int, batch: int = 4
) -> argparse.ArgumentParser:
    """A parser with the options of every program that records trainings."""
    parser = parser_of(description)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")
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
    given = {"batch": args.batch, "seed": args.seed}
    images = functools.partial(image_task, read_images(args.images), **given)
    text = functools.partial(text_task, read_text(args.text), **given)
    return (
        Run("images", images, args.density_images, "conv_1/kernel"),
        Run("text", text, args.density_text, "lstm_0/input"),
    )


def text_task(text: str, workers: int, *, batch: int, seed: int) -> Task:
    """A character language model; the last twentieth of the text is for validation.

    Raises:
      InputError: the text is too short.
    """
    alphabet, code = np.unique(np.array(list(text)), return_inverse=True)
    cut, vocabulary = len(code) * 19 // 20, len(alphabet)
    if len(code) - cut < 10 * WINDOW:
        raise InputError(f"the text has {len(code)} characters, at least {200 * WINDOW} are needed")
    random = np.random.default_rng(seed)

    def windows(part, starts):
        found = part[starts[..., None] + np.arange(WINDOW + 1)].astype(np.int32)
        return found[..., :-1], found[..., 1:]

    def stream():
        while True:
            yield windows(code[:cut], random.integers(0, cut - WINDOW, (workers, batch)))

    def matrix(inputs, outputs):
        scale = inputs**-0.5
        return jnp.asarray(random.uniform(-scale, scale, (inputs, outputs)), jnp.float32)

    def cells(inputs):
        kernels = {"input": matrix(inputs, 4 * HIDDEN), "recurrent": matrix(HIDDEN, 4 * HIDDEN)}
        return {**kernels, "bias": forgetful(HIDDEN)}

    params = {
        "embedding": normal(random, (vocabulary, EMBEDDING), 1.0),
        "lstm_0": cells(EMBEDDING),
        "lstm_1": cells(HIDDEN),
        "output": {"kernel": matrix(HIDDEN, vocabulary), "bias": jnp.zeros(vocabulary)},
    }
    held_out = windows(code[cut:], np.linspace(0, len(code) - cut - WINDOW - 1, 256, dtype=int))
    return _task(_language_model, params, stream(), held_out, TEXT_RATE, clip=1.0)


def image_task(data: Dataset, workers: int, *, batch: int, seed: int) -> Task:
    """A VGG-like network on images of one channel."""
    random = np.random.default_rng(seed)

    def stream():
        size = workers * batch
        if size > len(data.train_images):
            raise InputError(f"a step takes {size} images, of {len(data.train_images)}")
        for images, labels in batches(data.train_images, data.train_labels, size=size, seed=seed):
            yield images.reshape(workers, batch, *images.shape[1:]), labels.reshape(workers, batch)

    def scaled(*shape):
        return layer(random, shape, (2 / np.prod(shape[:-1])) ** 0.5)

    params, inputs = {}, 1
    for i, outputs in enumerate(CHANNELS):
        params[f"conv_{i}"] = scaled(3, 3, inputs, outputs)
        inputs = outputs
    height, width = (size // 2 ** len(POOLED) for size in data.train_images.shape[1:])
    params["dense"] = scaled(height * width * inputs, DENSE)
    params["output"] = scaled(DENSE, data.classes)
    held_out = data.test_images[:2000], data.test_labels[:2000]
    return _task(_convolutional, params, stream(), held_out, IMAGE_RATE, clip=math.inf)


def _task(
    apply: Callable[[Any, Any], jax.Array],
    params: Any,
    stream: Iterator[Any],
    held_out: Any,
    rate: float,
    clip: float,
) -> Task:
    """A task of a network, ``apply(params, inputs) -> logits``."""

    def measures(params, batch):
        logits, labels = apply(params, batch[0]), jnp.asarray(batch[1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels)}

    def validate(params):
        return {name: float(value) for name, value in measured(params).items()}

    measured = jax.jit(lambda params: measures(params, held_out))
    return Task(params, lambda p, batch: measures(p, batch)["loss"], stream, validate, rate, clip)


def _language_model(params: Any, tokens: Any) -> jax.Array:
    """Maps i32[batch, time] to logits, f32[batch, time, vocabulary]."""
    x = params["embedding"][tokens].swapaxes(0, 1)
    for cells in (params["lstm_0"], params["lstm_1"]):
        x = recurrence(x @ cells["input"] + cells["bias"], cells["recurrent"])
    return affine(params["output"], x.swapaxes(0, 1))


def _convolutional(params: Any, images: jax.Array) -> jax.Array:
    """Maps f32[batch, height, width] to logits, f32[batch, classes]."""
    x = images[..., None]
    for i in range(len(CHANNELS)):
        kernel, bias = params[f"conv_{i}"]["kernel"], params[f"conv_{i}"]["bias"]
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x + bias)
        if i in POOLED:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(affine(params["dense"], x.reshape(x.shape[0], -1)))
    return affine(params["output"], x)
