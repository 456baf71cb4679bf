"""Reports in JSON files: written whole, and checked when they are read.

A pattern says what a file must hold. A dictionary: what must be under its keys; others may be
there. A list of one pattern: a list of what fits it, at least one; a tuple of one pattern: the
same, and none will do. A function, such as :func:`number` makes: a single value; it returns what it
expects, in words, where a value is something else, and None where it fits.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .options import InputError

Check = Callable[[Any], str | None]
Pattern = dict[str, "Pattern"] | list["Pattern"] | tuple["Pattern"] | Check
# What a message shows of a value, in characters.
_SHOWN = 40


def write(path: Path | None, content: Any) -> None:
    """Writes a report, arrays as lists; what was there stays until all of it is written.

    Nothing is done where the path is None, an option that was not given.
    """
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    text = json.dumps(content, indent=1, default=lambda x: np.asarray(x).tolist())
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path, pattern: Pattern, source: str) -> Any:
    """The content of a report that fits the pattern; ``source`` writes such files.

    Raises:
      InputError: the file can't be read, is no JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{path} is not a JSON file of {source}: {reason}") from error
    complaint = _complaint(content, pattern, "")
    if complaint:
        raise InputError(f"{path} is not a file of {source}: {complaint}")
    return content


def number(least: float = -math.inf, most: float = math.inf, *, nan: bool = False) -> Check:
    """A number in ``[least, most]`` that a float can hold; with ``nan``, also inf and NaN."""

    def fits(value: Any) -> bool:
        if not _is_number(value):
            return False
        return least <= value <= most if math.isfinite(value) else nan

    return _check(fits, f"a number{_range(least, most)}")


def whole(least: int, most: int = 2**31 - 1) -> Check:
    """A whole number in ``[least, most]``."""

    def fits(value: Any) -> bool:
        return isinstance(value, int) and _is_number(value) and least <= value <= most

    return _check(fits, f"a whole number{_range(least, most)}")


def text(*choices: str) -> Check:
    """A string, one of the choices where there are any."""
    expected = f"one of {', '.join(map(repr, choices))}" if choices else "a string"
    return _check(
        lambda value: isinstance(value, str) and (not choices or value in choices), expected
    )


def optional(pattern: Check) -> Check:
    """The same or null."""
    return lambda value: None if value is None else pattern(value)


def _check(fits: Callable[[Any], bool], expected: str) -> Check:
    return lambda value: None if fits(value) else expected


def _complaint(value: Any, pattern: Pattern, where: str) -> str | None:
    """The first thing that does not fit, in words; None where all does."""
    expected, parts = None, []
    if isinstance(pattern, dict):
        if not isinstance(value, dict):
            expected = f"an object with {', '.join(map(repr, pattern))}"
        elif missing := [key for key in pattern if key not in value]:
            return f"no {missing[0]!r} in {where or 'it'}"
        else:
            parts = [(value[k], p, f"{where}.{k}".lstrip(".")) for k, p in pattern.items()]
    elif isinstance(pattern, list | tuple):
        needed = isinstance(pattern, list)
        if not isinstance(value, list) or (needed and not value):
            expected = f"a list{' that is not empty' if needed else ''}"
        else:
            parts = [(x, pattern[0], f"{where}[{i}]") for i, x in enumerate(value)]
    else:
        expected = pattern(value)
    if expected:
        shown = json.dumps(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
        return f"{where or 'it'} must be {expected}, got {shown}"
    return next(filter(None, (_complaint(*part) for part in parts)), None)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (OverflowError, TypeError, ValueError):
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def _range(least: float, most: float) -> str:
    if math.isinf(most):
        return "" if math.isinf(least) else f" of at least {least:g}"
    return f" from {least:g} to {most:g}"
