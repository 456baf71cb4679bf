"""The command line of a program: types of options, output files, one-line errors."""

import argparse
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from . import namespaces
from .processes import Interrupted, interrupt_when_told


class InputError(ValueError):
    """An option or a file is wrong; the message is one line for the user."""


def parser_of(description: str | None, *names: str, **usual: Any) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the program, and whose errors are one line.

    The name of an option determines its type and help. ``names`` have no default, such as
    ``"json"``; ``usual`` have a default, or (default, help), or (default, help, choices). An option
    takes several values if its default is a list, and is a flag if its default is False. Its type
    is a whole number of at least one unless the name determines another.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.error = lambda message: made.exit(2, f"{made.prog}: {message}\n")
    for name, value in (dict.fromkeys(names) | usual).items():
        default, *said = value if isinstance(value, tuple) else (value,)
        text, choices = (*said, None, None)[:2]
        more: dict[str, Any] = {"default": default, "help": text or _HELP.get(name)}
        if default is False:
            more["action"] = "store_true"
        else:
            kind = str if choices else _TYPES.get(name, at_least_one)
            more |= {"type": kind, "choices": choices}
            more |= {"nargs": "+"} if isinstance(default, list) or name in _SEVERAL else {}
        made.add_argument(f"--{name.replace('_', '-')}", **more)
    return made


def check_names(
    parser: argparse.ArgumentParser, given: Iterable[str] | None, known: Collection[str]
) -> None:
    """Ends with one line if ``--only`` has a name that is not known."""
    for name in given or ():
        if name not in known:
            parser.error(f"--only {name!r} is none of: {'; '.join(known)}")


def check_batch(parser: argparse.ArgumentParser, batch: int, workers: int) -> None:
    """Ends with one line if the workers would get batches of different sizes."""
    if batch % workers:
        parser.error(f"--batch {batch} can't be dealt out to {workers} workers")


def program(main: Callable[[list[str] | None], int | None]) -> Callable[..., int]:
    """Makes ``main(argv) -> status`` a program that prints an error as one line."""
    # A wrong input, a network or worker that fails, and an interrupt.
    statuses = {InputError: 2, namespaces.NetworkError: 1, Interrupted: 130}

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        try:
            return main(argv) or 0
        except tuple(statuses) as error:
            message = str(error) or "interrupted"
            status = next(status for kind, status in statuses.items() if isinstance(error, kind))
        name = main.__module__ if main.__module__ != "__main__" else Path(sys.argv[0]).stem
        print(f"{name.rpartition('.')[2]}: {message}", file=sys.stderr)
        return status

    return run


def require_network() -> None:
    """Raises an InputError if no network can be made here; from now on a ``kill`` cleans up."""
    interrupt_when_told()
    reason = namespaces.unusable()
    if reason is not None:
        raise InputError(reason)


def _type(fits: Callable[[float], bool], what: str, kind: type = float) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if not fits(float(text)):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return kind(float(text))

    return number


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number, which may also be written ``1e6``."""
    what = f"a whole number of at least {least}"
    return _type(lambda x: least <= x < math.inf and x % 1 == 0, what, int)


at_least_one = at_least(1)
# Workers that exchange something, or values that have a deviation.
several = at_least(2)
# A density, and a learning rate or a factor.
share = _type(lambda x: 0 < x <= 1, "in (0, 1]")
positive = _type(lambda x: 0 < x < math.inf, "a positive number")


def link(text: str) -> str:
    """The type of a link, such as 100mbit."""
    try:
        namespaces.rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def output(text: str) -> Path:
    """The type of an output file, checked first: hours of work must not end with an error."""
    path = Path(text)
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


def say(text: str) -> None:
    """Reports progress on standard error: on a terminal in one line, otherwise with the time."""
    progress(text)
    if not sys.stderr.isatty():
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def progress(text: str, *, last: bool = False) -> None:
    """Shows on a terminal how far a run is."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\n" if last else "\r", file=sys.stderr, flush=True)


_TYPES: dict[str, Callable[[str], Any]] = {"seed": int, "only": str}
_TYPES |= dict.fromkeys(("json", "plot", "runs"), output)
_TYPES |= dict.fromkeys(("text", "images", "folder"), Path)
_TYPES |= dict.fromkeys(("link", "links"), link)
_TYPES |= dict.fromkeys(("density", "densities", "density_text", "density_images"), share)
_TYPES |= dict.fromkeys(("rates", "factor", "share", "slack"), positive)
_TYPES |= dict.fromkeys(("timeout", "regularisation", "seconds", "bandwidth", "latency"), positive)
_TYPES |= dict.fromkeys(("sites", "trials", "workers"), several)
# These take several values, also without a default.
_SEVERAL = ("only", "rates")
_HELP = {"density": "k / n", "every": "steps to a record", "points": "of a curve"}
_HELP |= {"rounds": "turns of each contestant", "timeout": "seconds for one answer"}
_HELP |= {"steps": "of each run, or turn", "width": "of the model", "link": "such as 100mbit"}
_HELP |= {"text": "plain text; Python's help topics by default", "only": "of these contestants"}
_HELP |= {"images": "a folder of IDX files; scikit-learn's digits by default"}
_HELP |= {"rates": "peaks", "runs": "keep runs here, and go on with them"}
_HELP |= {"json": "also write the numbers here", "plot": "draw them: a PNG"}
# Options of programs that run over one network of limited links.
LINKS = {"link": ["100mbit", "1gbit"], "workers": 4}
LINKS |= {"no_pin": (False, "let processes use all cores")}
