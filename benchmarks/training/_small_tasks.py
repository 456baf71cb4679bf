"""Images to classify and text to continue, as tasks of _simulated_training."""

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples._data import Dataset

from .._common.options import InputError
from . import _text_models
from ._simulated_training import Task
from ._small_models import CONTEXT, WIDTH, Network, loss_of, transformer

# The images of one evaluation, to bound the memory.
_PART = 500
Make = Callable[[int, int], Network]


def image_task(data: Dataset, network: Network) -> Task:
    """A task on images; its value is the accuracy on all test images."""

    @jax.jit
    def sums(params, images, labels):
        logits = network.apply(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(losses), jnp.sum(jnp.argmax(logits, -1) == labels)

    def validate(params):
        parts = [slice(x, x + _PART) for x in range(0, len(data.test_labels), _PART)]
        found = [sums(params, data.test_images[x], data.test_labels[x]) for x in parts]
        loss, right = np.sum(found, axis=0) / len(data.test_labels)
        return {"loss": float(loss), "accuracy": float(right)}

    def batch_of(chosen):
        return data.train_images[chosen], data.train_labels[chosen]

    def accuracy(params):
        return validate(params)["accuracy"]

    learned = network.init, loss_of(network), batch_of, len(data.train_labels)
    return Task("images", *learned, accuracy, once=True, validate=validate)


def text_task(
    text: str, *, windows=256, width: int = WIDTH, network: Make = transformer, context=CONTEXT
) -> Task:
    """A task on text; its value is the loss on the last 10 % of it, in nats for a character.

    The loss is measured on so many windows, evenly spread, with ``network(vocabulary, width)``. A
    text that is too short is an InputError.
    """
    alphabet, code = np.unique(np.array(list(text)), return_inverse=True)
    made = network(len(alphabet), width)
    return _sequence_task("characters", code, context, made, loss_of(made), windows)


def word_task(text: str, *, windows: int = 1024, width: int = _text_models.WIDTH) -> Task:
    """A task on text; its value is the loss on the last 10 % of it, in nats for a word.

    Case is ignored; a punctuation mark is a word, and all rare words together are one.
    """
    found = re.findall(r"\w+(?:'\w+)*|[^\w\s]", text.lower())
    common = collections.Counter(found).most_common(_text_models.VOCABULARY - 1)
    number = {word: i for i, (word, _) in enumerate(common)}
    code = np.array([number.get(word, len(common)) for word in found])
    made = _text_models.words(width)
    return _sequence_task("words", code, _text_models.WORDS, made, made.loss, windows)


def _sequence_task(
    what: str, code: np.ndarray, context: int, network: Any, loss: Any, windows: int
) -> Task:
    """Predicts the successor of each of ``context`` numbers, in windows that begin anywhere."""
    cut = len(code) * 9 // 10
    if len(code) - cut < 2 * context:
        raise InputError(f"the text has {len(code)} {what}, at least {20 * context} are needed")

    def windows_at(part, starts):
        found = part[starts[..., None] + np.arange(context + 1)]
        return found[..., :-1], found[..., 1:]

    code = code.astype(np.int32)
    starts = np.linspace(0, len(code) - cut - context - 1, windows, dtype=np.int32)
    held_out = windows_at(code[cut:], starts)
    part = min(64, windows)

    @jax.jit
    def measured(params):
        parts = [jnp.asarray(x.reshape(-1, part, context)) for x in held_out]
        return jax.lax.map(lambda batch: loss(params, batch), tuple(parts)).mean()

    def batch_of(chosen):
        return windows_at(code[:cut], chosen)

    learned = network.init, loss, batch_of, cut - context
    return Task("text", *learned, lambda params: float(measured(params)), once=False)
