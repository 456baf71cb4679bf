"""The command line of a program: types of options, output files, errors of one line."""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from . import namespaces
from .processes import Interrupted


class InputError(ValueError):
    """An option or a file is wrong; the message is one line for the user."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the program, and whose errors are one line."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.error = lambda message: made.exit(2, f"{made.prog}: {message}\n")
    return made


def add_outputs(parser: argparse.ArgumentParser, *, plot: bool = False) -> None:
    """Adds ``--json``, and ``--plot`` where the program draws."""
    parser.add_argument("--json", type=output, metavar="FILE", help="also write the numbers here")
    if plot:
        parser.add_argument("--plot", type=output, metavar="FILE", help="draw them: a PNG")


def add_usual(parser: argparse.ArgumentParser, **given: Any) -> None:
    """Adds options whose type their name tells, each with its default, or with (default, help).

    Several values where the default is a list; by default a whole number of at least one.
    """
    for name, value in given.items():
        default, text = value if isinstance(value, tuple) else (value, _HELP.get(name))
        more = {"type": _TYPES.get(name, at_least_one), "default": default, "help": text}
        more |= {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **more)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds ``--text`` and ``--images``, of what is learned."""
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--images", type=Path, metavar="DIR", help="IDX files; scikit-learn's digits by default")


def add_links(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """Adds what programs over one network of limited links have in common."""
    add = parser.add_argument
    add("--link", type=link, nargs="+", default=["100mbit", "1gbit"], metavar="RATE")
    add("--workers", type=several, default=4, metavar="P")
    add("--no-pin", action="store_true", help="let processes use all cores")
    add("--timeout", type=positive, default=seconds, help="seconds for one answer")


def check_names(
    parser: argparse.ArgumentParser, given: Iterable[str] | None, known: Collection[str]
) -> None:
    """Ends with one line where ``--only`` has another name than the known ones."""
    for name in given or ():
        if name not in known:
            parser.error(f"--only {name!r} is none of: {'; '.join(known)}")


def program(main: Callable[[list[str] | None], int | None]) -> Callable[..., int]:
    """Makes ``main(argv) -> status``; what goes wrong is one line.

    The status is 2 for a wrong input, 1 for a network or worker that fails, 130 for an interrupt.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        try:
            return main(argv) or 0
        except InputError as error:
            message, status = str(error), 2
        except namespaces.NetworkError as error:
            message, status = str(error), 1
        except Interrupted:
            message, status = "interrupted", 130
        name = main.__module__ if main.__module__ != "__main__" else Path(sys.argv[0]).stem
        print(f"{name.rpartition('.')[2]}: {message}", file=sys.stderr)
        return status

    return run


def require_network() -> None:
    """Raises an InputError where no network of namespaces can be made."""
    reason = namespaces.unusable()
    if reason is not None:
        raise InputError(reason)


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number; ``1e6`` is one too."""

    def count(text: str) -> int:
        number = float(text)
        if not least <= number < float("inf") or number % 1:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(number)

    return count


at_least_one = at_least(1)
# Workers between which something is exchanged, or values that have a deviation.
several = at_least(2)


def share(text: str) -> float:
    """The type of a density."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return float(text)


def positive(text: str) -> float:
    """The type of a rate or a factor."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return float(text)


def link(text: str) -> str:
    """The type of the rate of a link, such as 100mbit."""
    try:
        namespaces.rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def output(text: str) -> Path:
    """The type of a file to write: hours of work must not end with one that can't be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


def say(text: str) -> None:
    """Says on standard error what a run is at: on a terminal in one line, else with the time."""
    if sys.stderr.isatty():
        progress(text)
    else:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def progress(text: str, *, last: bool = False) -> None:
    """Says on a terminal how far a run is."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\n" if last else "\r", file=sys.stderr, flush=True)


_TYPES: dict[str, Callable[[str], Any]] = {"seed": int}
_TYPES |= dict.fromkeys(("density", "densities", "density_text", "density_images"), share)
_TYPES |= dict.fromkeys(("rate", "factor", "max_norm", "bandwidth", "latency"), positive)
_TYPES |= dict.fromkeys(("timeout", "regularisation", "share", "seconds"), positive)
_TYPES |= dict.fromkeys(("sites", "trials", "workers"), several)
_HELP = {"density": "k / n", "every": "steps to a record", "points": "of a curve"}
_HELP |= {"rounds": "turns of each contestant", "timeout": "seconds for one answer"}
_HELP |= {"steps": "of each run, or turn", "width": "of the model"}
