"""Options and data that the benchmarks on recorded training share."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _recorded_training as training

from _data import (  # pyright: ignore[reportMissingImports]
    Dataset,
    InputError,
    digits,
    idx_folder,
)

# Of the learning rates per worker; see _recorded_training.
TEXT_RATE, IMAGE_RATE = 0.5, 0.01


class Run(NamedTuple):
    """One training run to record.

    Attributes:
      name: images or text.
      make_task: ``make_task(workers)``, a fresh task with data for so many workers.
      density: k / n.
    """

    name: str
    make_task: Callable[[int], training.Task]
    density: float


def parser_of(description: str | None, steps: int) -> argparse.ArgumentParser:
    """A parser with the common options, which exits with status 2 and one line."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("--text", type=Path, metavar="FILE", help="plain text, such as a novel")
    parser.add_argument("--images", type=Path, metavar="DIR", help="IDX files, such as MNIST")
    parser.add_argument("--density-text", type=share, default=0.02)
    parser.add_argument("--density-images", type=share, default=0.01)
    parser.add_argument("--steps", type=at_least_one, default=steps, help="of each run")
    parser.add_argument("--batch", type=at_least_one, default=4, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG")
    return parser


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with one line where a file could not be written in the end."""
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            parser.error(f"cannot write {path}")


def at_least_one(value: str) -> int:
    """The type of a positive count."""
    if int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return int(value)


def several(value: str) -> int:
    """The type of a number of workers between which something is exchanged."""
    if int(value) < 2:
        raise argparse.ArgumentTypeError(f"{value} is not at least 2")
    return int(value)


def share(value: str) -> float:
    """The type of a density."""
    if not 0 < float(value) <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not in (0, 1]")
    return float(value)


def read_text(path: Path | None) -> str:
    """The text to learn; Python's own help topics by default.

    Raises:
      InputError: the file cannot be read.
    """
    if path is None:
        from pydoc_data import topics

        return "\n".join(topics.topics.values())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def read_images(folder: Path | None) -> Dataset:
    """The images to classify; scikit-learn's digits by default.

    Raises:
      InputError: a file is missing or malformed.
    """
    return idx_folder(folder) if folder else digits()


def recorded_runs(args: argparse.Namespace) -> tuple[Run, Run]:
    """The image run and the text run.

    Raises:
      InputError: the data cannot be read.
    """
    text, images = read_text(args.text), read_images(args.images)
    options: dict[str, Any] = {"batch": args.batch, "seed": args.seed}

    def image_task(workers: int) -> training.Task:
        return training.image_task(images, workers=workers, rate=IMAGE_RATE, **options)

    def text_task(workers: int) -> training.Task:
        return training.text_task(text, workers=workers, rate=TEXT_RATE, **options)

    return (
        Run("images", image_task, args.density_images),
        Run("text", text_task, args.density_text),
    )


def progress(name: str, step: int, steps: int) -> None:
    """Says on a terminal how far a run is."""
    if sys.stderr.isatty():
        end = "\n" if step + 1 == steps else ""
        print(f"\r{name}: step {step + 1} of {steps}", end=end, file=sys.stderr)
