"""Shared by the command lines of the examples."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIGURES = (".pdf", ".png", ".svg")


def parser_of(description: str, program: str | None = None) -> argparse.ArgumentParser:
    """A parser that ends with status 2 and one line if an option is wrong."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    return parser


def numbers_of(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """``add(name, kind, default, low, high, text)``, which adds an option within bounds."""

    def add(name: str, kind: type, default: Any, low: float, high: float, text: str) -> None:
        def convert(value: str):
            number = kind(value)
            if not low <= number <= high:
                raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
            return number

        convert.__name__ = kind.__name__  # for argparse's message
        text = text if default is None else f"{text} (default: {default})"
        parser.add_argument(name, type=convert, default=default, metavar="N", help=text)

    return add


def positive(value: str) -> int:
    """A whole number of 1 or more, as the type of an option."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return int(value)


def training_parser(
    description: str, *, steps: int, batch: int, rate: float
) -> argparse.ArgumentParser:
    """A parser with the options of every training on simulated workers, and these defaults."""
    parser = parser_of(description)
    add = numbers_of(parser)
    add("--workers", int, 8, 1, 64, "simulated workers")
    add("--steps", int, steps, 1, 10**7, "steps of each run")
    add("--batch", int, batch, 1, 10**7, "examples in a batch of all workers together")
    add("--lr", float, rate, 1e-9, 1e3, "peak of the learning rate")
    add("--seed", int, 0, 0, 2**31 - 1, "of the parameters and of the batches")
    return parser


def check_batch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program if the workers cannot have equal parts of a batch."""
    if options.batch % options.workers:
        parser.error(f"--batch {options.batch} is not divisible by --workers {options.workers}")


def check_outputs(
    parser: argparse.ArgumentParser, figure: Path | None, *others: Path | None
) -> None:
    """Makes the folders of the files, None aside; ends the program if one can't be written."""
    if figure and figure.suffix not in FIGURES:
        parser.error(f"--out {figure} must end in one of {', '.join(FIGURES)}")
    for path in filter(None, (figure, *others)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot create the folder of {path}: {error.strerror}")
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            parser.error(f"cannot write {path}")
