"""Data for the examples: digits or other images, text, and batches of either."""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class InputError(ValueError):
    """A file or an option is wrong; the message is one line for the user."""


class Dataset(NamedTuple):
    """Labeled images, standardized by the mean and deviation of the training images.

    Attributes:
      train_images: f32[N, height, width].
      train_labels: i32[N], below `classes`.
      test_images: f32[M, height, width].
      test_labels: i32[M], below `classes`.
      classes: the number of classes.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: int


def digits(test_fraction: float = 0.25) -> Dataset:
    """Returns scikit-learn's 1,797 digits of 8x8 pixels; the split is the same at every call."""
    images, labels = load_digits().images, load_digits().target
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=test_fraction, random_state=0, stratify=labels
    )
    return _dataset(train_images, train_labels, test_images, test_labels)


def idx_folder(folder: Path) -> Dataset:
    """Returns the MNIST-like data set in `folder`, such as MNIST or Fashion-MNIST.

    Args:
      folder: holds `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same two with
        `t10k` for `train`; each of them plain or gzipped (`.gz`).

    Raises:
      InputError: a file is missing or malformed, or two files do not belong together.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    train_images, train_labels = _images_and_labels(folder, "train")
    test_images, test_labels = _images_and_labels(folder, "t10k")
    if train_images.shape[1:] != test_images.shape[1:]:
        raise InputError(
            f"{folder}: training images are {_by(train_images)}, test images {_by(test_images)}"
        )
    return _dataset(train_images, train_labels, test_images, test_labels)


def read_idx(path: Path) -> np.ndarray:
    """Returns the u8[...] array of an IDX file, gzipped if its name ends in `.gz`.

    At most one byte more than the header announces is read and decompressed.

    Raises:
      InputError: the file cannot be read, or is not an IDX file of unsigned bytes.
    """
    packed = path.suffix == ".gz"
    try:
        # The most that a file can hold; deflate packs at most 1,032 bytes into one.
        most = path.stat().st_size * (1032 if packed else 1)
        with gzip.open(path) if packed else path.open("rb") as file:
            # Two zero bytes, the type (8 is unsigned byte), the rank, then each size as
            # big-endian u32.
            start = file.read(4)
            if len(start) < 4 or start[:3] != b"\x00\x00\x08" or not 1 <= start[3] <= 4:
                raise InputError(f"{path} is not an IDX file of unsigned bytes")
            sizes = file.read(4 * start[3])
            shape = tuple(
                int.from_bytes(sizes[at : at + 4], "big") for at in range(0, len(sizes), 4)
            )
            asked = math.prod(shape)
            content = file.read(asked + 1) if asked <= most else b""
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if len(sizes) < 4 * start[3] or len(content) != asked:
        found = "more" if len(content) > asked else "less"
        raise InputError(
            f"{path} holds {found} than the {asked} bytes that its header {shape} asks for"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def batches(
    images: np.ndarray, labels: np.ndarray, *, size: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches without end, in a new order in each epoch, without a last partial batch."""
    if not 0 < size <= len(images):
        raise InputError(f"a batch of {size} images is asked for, and there are {len(images)}")
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(images))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield images[chosen], labels[chosen]


def text_of(path: Path | None) -> np.ndarray:
    """The characters of a file, or of Python's own help topics, as ASCII: ``u8[n]``.

    Raises:
      InputError: the file cannot be read.
    """
    if path is None:
        from pydoc_data import topics

        text = "".join(topics.topics.values())
    else:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
    # Characters that are not ASCII become question marks.
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8)


def windows(text: np.ndarray, *, count: int, length: int, seed: int | tuple) -> np.ndarray:
    """``i32[count, length + 1]``: pieces of the text from random places.

    Raises:
      InputError: the text is shorter than a window.
    """
    if len(text) <= length + 1:
        raise InputError(f"a text of {len(text)} characters has no windows of {length + 1}")
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, count)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _images_and_labels(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(_find(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or images.size == 0:
        raise InputError(
            f"{folder}: {part} images {images.shape} and labels {labels.shape} do not belong "
            "together; expected (N, height, width) and (N,)"
        )
    return images, labels


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise InputError(f"{folder} holds neither {name} nor {name}.gz")


def _by(images: np.ndarray) -> str:
    return f"{images.shape[1]}x{images.shape[2]}"


def _dataset(
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
) -> Dataset:
    mean, deviation = train_images.mean(), train_images.std()

    def standardise(images: np.ndarray) -> np.ndarray:
        return (images.astype(np.float32) - np.float32(mean)) / np.float32(max(deviation, 1e-6))

    return Dataset(
        train_images=standardise(train_images),
        train_labels=train_labels.astype(np.int32),
        test_images=standardise(test_images),
        test_labels=test_labels.astype(np.int32),
        classes=1 + int(max(train_labels.max(), test_labels.max())),
    )
