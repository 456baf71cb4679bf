"""The tasks: a model, its data, and the defaults for them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..training import _small_models, _text_models
from ..training._data import read_images, read_text
from ..training._simulated_training import Task
from ..training._small_models import WIDTH
from ..training._small_tasks import image_task, text_task, word_task

ADAMW, SGD = "AdamW", "SGD"
# The task at a density so low that an entry stays unsent for many steps, and its hidden layer.
DELAYED, HIDDEN = "images-hidden", 128


class Kind(NamedTuple):
    """The defaults of a task.

    Attributes:
      model: and data, in words.
      optimizer: ADAMW; or SGD, with momentum.
      rates: peaks of the learning rate, to choose from.
      batch: of all workers.
      width: of the model; None if it has none to choose.
      large: whether a large value is a good one: an accuracy, and not a loss.
    """

    model: str
    optimizer: str
    rates: tuple[float, ...]
    batch: int
    width: int | None
    large: bool


# Tasks in which each of so many workers draws from examples of its own: a piece of the text, or the
# images of one or two classes. A dense run has the same batches.
PARTS, APART = 8, "-apart"

_LSTM_RATES, _ADAMW_RATES = (0.005, 0.01, 0.02, 0.04), (0.001, 0.002, 0.004, 0.008)
_WORDS = "embeddings of words, with sparse gradients"
KINDS = {
    name: Kind(*usual)
    for name, *usual in (
        ("text", "a transformer on characters", ADAMW, (0.01, 0.02, 0.03), 32, WIDTH, False),
        ("lstm", "an LSTM on characters", ADAMW, _LSTM_RATES, 32, _text_models.CELLS, False),
        ("words", _WORDS, ADAMW, (0.005, 0.01, 0.02), 32, _text_models.WIDTH, False),
        ("images", "a convolutional network", SGD, (0.02, 0.05, 0.1, 0.2, 0.5), 128, None, True),
        (DELAYED, "a hidden layer", SGD, (0.02, 0.05, 0.1, 0.2), 128, None, True),
        ("images-adamw", "the same network", ADAMW, _ADAMW_RATES, 128, None, True),
        ("text-apart", f"text in {PARTS} pieces", ADAMW, (0.01, 0.02, 0.03), 64, WIDTH, False),
        ("images-apart", "classes apart", ADAMW, _ADAMW_RATES, 128, None, True),
    )
}


def make(name: str, width: int | None, text: Path | None, images: Path | None) -> Task:
    """The task, from the user's files or by default from data in Python and scikit-learn."""
    if name.endswith(APART):
        whole = make(name.removesuffix(APART), width, text, images)
        labels = read_images(images).train_labels if name.startswith("images") else None
        return _apart(whole, labels)._replace(name=name)
    if name.startswith("images"):
        data = read_images(images)
        given = data.train_images.shape[1:], data.classes
        network = (
            _small_models.one_hidden_layer(*given, HIDDEN)
            if name == DELAYED
            else _small_models.convolutional(*given)
        )
        return image_task(data, network)._replace(name=name)
    if name == "words":
        made = word_task(read_text(text), width=width)
    else:
        network = _text_models.lstm if name == "lstm" else _small_models.transformer
        made = text_task(read_text(text), width=width, network=network)
    return made._replace(name=name)


def _apart(task: Task, labels: np.ndarray | None) -> Task:
    """The task with a part of the examples for each worker, sorted by their labels if given."""
    size = task.count // PARTS
    order = np.arange(task.count) if labels is None else np.argsort(labels, kind="stable")

    def batch_of(chosen: np.ndarray) -> object:
        # The last two axes are the workers and their examples; a dense run has one worker.
        flat = chosen.reshape(*chosen.shape[:-2], -1)
        part = np.arange(flat.shape[-1]) * PARTS // flat.shape[-1]
        return task.batch_of(order[part * size + flat % size].reshape(chosen.shape))

    return task._replace(batch_of=batch_of)
