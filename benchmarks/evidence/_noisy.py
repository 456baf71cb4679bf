"""Trainings that tell small differences of accuracy: digits with noise that is never the same.

Clean digits are known by heart after some steps, and 450 held-out images right to 98 % leave
nothing to compare. With noise as large as the pixels most is learned and not all of it, and a
held-out image counts by how many of its copies are right. A seed draws everything anew, the images
that are held out, too, so that the deviation of the seeds is all the error that there is.
"""

import functools
import zlib

import numpy as np

from ..training._data import read_images
from ..training._simulated_training import Task
from ..training._small_models import convolutional
from ..training._small_tasks import image_task
from ._runs import BATCH, STEPS, WORKERS, image_variants, trained

# As in examples/train_digits.py: the deviation of a pixel is 1, and so is that of the noise.
NOISE, COPIES, HELD_OUT = 1.0, 8, 450
# That of clean digits is too large: some seeds of sparse SGD lost all they had learned.
RATE = 0.02


@functools.lru_cache(maxsize=4)
def task(seed: int) -> Task:
    """A convolutional network on noisy digits, n = 18,154."""
    found = read_images(None)
    images = np.concatenate([found.train_images, found.test_images])
    labels = np.concatenate([found.train_labels, found.test_labels])
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    inside, outside = order[HELD_OUT:], order[:HELD_OUT]
    copies = np.concatenate([outside] * COPIES)
    data = found._replace(
        train_images=images[inside],
        train_labels=labels[inside],
        test_images=noisy(images[copies], random),
        test_labels=labels[copies],
    )
    made = image_task(data, convolutional(images.shape[1:], found.classes))

    def batch_of(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # The same for every exchange: all see the same noise at the same step.
        random = np.random.default_rng((seed, zlib.crc32(chosen.tobytes())))
        return noisy(data.train_images[chosen], random), data.train_labels[chosen]

    return made._replace(batch_of=batch_of)


def noisy(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The images with noise on top."""
    return images + np.float32(NOISE) * random.standard_normal(images.shape, np.float32)


@functools.lru_cache(maxsize=256)
def accuracy(name: str, seed: int, quick: bool) -> float:
    """That on the held-out images after a training, which is made once, in percent."""
    steps = STEPS[0 if quick else 1]
    variant = image_variants(steps, RATE)[name]
    curve = trained(task(seed), variant, WORKERS, steps, BATCH, seed, name)
    return 100 * curve.values[-1]
