"""What the command lines of the examples have in common."""

import argparse
from collections.abc import Callable
from typing import Any


def parser_of(description: str, program: str | None = None) -> argparse.ArgumentParser:
    """A parser that ends with status 2 and one line when an option is wrong."""
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
