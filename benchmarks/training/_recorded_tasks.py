"""The tasks of the recorded trainings: an LSTM on characters, a small VGG on images."""

import argparse
from typing import Any

from .._common import options
from ._data import read_images, read_text
from ._recorded_training import Run
from ._small_models import Network, convolutional
from ._small_tasks import image_task, text_task
from ._text_models import lstm

# An LSTM of two layers: entries of a character, cells, characters of a window.
ENTRIES, CELLS, WINDOW = 64, 256, 32
CHANNELS, DENSE = (32, 64, 128, 128), 256
# Pooling by two follows these of the convolutions.
POOLED = (0, 1, 3)


def recording_parser(
    description: str | None, *names: str, batch: int = 4, **usual: Any
) -> argparse.ArgumentParser:
    """A parser with the options of every program that records trainings, and its own."""
    usual |= {"density_text": 0.02, "density_images": 0.01, "seed": 0}
    usual |= {"batch": (batch, "of each worker")}
    return options.parser_of(description, "text", "images", "json", *names, **usual)


def _network(vocabulary: int, cells: int) -> Network:
    return lstm(vocabulary, cells, ENTRIES, layers=2)


def recorded_runs(args: argparse.Namespace) -> tuple[Run, Run]:
    """The image run and the text run, or an InputError if the data are unsuitable."""
    data = read_images(args.images)
    vgg = convolutional(data.train_images.shape[1:], data.classes, CHANNELS, DENSE, POOLED)
    given = {"batch": args.batch, "seed": args.seed}
    images = Run("images", image_task(data, vgg), args.density_images, "conv_1/kernel", **given)
    text = text_task(read_text(args.text), width=CELLS, network=_network, context=WINDOW)
    learns = {"rate": 0.5, "clip": 1.0}
    return images, Run("text", text, args.density_text, "lstm_0/input", **given, **learns)
